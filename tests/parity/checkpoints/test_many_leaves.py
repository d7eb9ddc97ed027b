"""Tens of thousands of leaves: what is worked out once for all that are alike, and that it is what each would get alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import Plan, open_source
from convert.checkpoints.orbax import zarr_metadata
from convert.cli import output
from convert.core.errors import PlanError
from convert.core.path_pattern import Pattern
from convert.core.weight_norm_ops import WeightNorm
from convert.planning.compile import compiler, named_leaf
from convert.planning.planner import make_plan
from support.memory_source import MemorySource, rule_file

RULES = """
- {einsum: "...D,DF->...F", from: "l_{i}/e_{e}/{gate,up}/w", bias: "l_{i}/e_{e}/{gate,up}/b", linear: "l.{i}.{e}.{gate,up}"}
- {einsum: "...D,DNH->...NH", from: "l_{i}/{q,k,v}/w", linear: "l.{i}.qkv"}
- {einsum: "...D,GDF->...GF", from: "l_{i}/two/w", linear: "l.{i}.{one,other}"}
- {einsum: "...F,FD->...D", from: "l_{i}/stack/w", stacked: {s: 0}, linear: "l.{i}.{s}.down"}
- {einsum: "...D,DNH->...NH", from: "l_{i}/stack/{q,k}", stacked: {s: 2, t: 0}, linear: "l.{i}.{s}.{t}.qk"}
- {einsum: "X...D,XDF->X...F", from: "l_{i}/stack/{gate,up}", stacked: {s: 1}, linear: "l.{i}.{s}.{X}.100%.{gate,up}"}
- {einsum: "X...D,XGDF->X...GF", from: "l_{i}/stack/two", stacked: {s: 3}, linear: "l.{i}.{X}.{s}.{one,other}"}
- {from: "l_{i}/norm/scale", multiplies_by: 1+scale, epsilon: 1e-6, rms_norm: "l.{i}.norm"}
- {from: "l_{i}/norm/extra", multiplies_by: scale, epsilon: 1e-6, optional: true, rms_norm: "l.{i}.extra"}
- {from: table, axes: VD, embedding: {module: embed, tied: head}}
"""


def mixture(layers: int, experts: int) -> dict[str, np.ndarray]:
    """A tree that `RULES` are for: D = 4, F = 6, N = 2, H = 3; every third layer is float16, and every second has one leaf more."""
    tree: dict[str, np.ndarray] = {"table": np.zeros((10, 4), np.float32)}
    for i in range(layers):
        dtype = np.float16 if i % 3 == 2 else np.float32
        shapes: dict[str, tuple[int, ...]] = {f"{x}/w": (4, 2, 3) for x in "qkv"}
        shapes |= {
            "two/w": (2, 4, 6),
            "norm/scale": (4,),
            "stack/w": (experts, 6, 4),
            "stack/two": (experts, 2, 4, experts, 6),
        }
        shapes |= {f"stack/{x}": (2, 4, experts, 2, 3) for x in "qk"}
        shapes |= {f"stack/{x}": (experts, experts, 4, 6) for x in ("gate", "up")}
        shapes |= {f"e_{e}/{x}/w": (4, 6) for e in range(experts) for x in ("gate", "up")}
        shapes |= {f"e_{e}/{x}/b": (6,) for e in range(experts) for x in ("gate", "up")}
        shapes |= {"norm/extra": (4,)} if i % 2 else {}
        tree |= {f"l_{i}/{name}": np.zeros(shape, dtype) for name, shape in shapes.items()}
    return tree


def planned(layers: int, experts: int) -> Plan:
    return make_plan(rule_file(RULES), MemorySource(mixture(layers, experts)))


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> Callable[[], int]:
    """Counts the calls of a function from now on; gives the number since it was last asked."""
    calls, real = [0], getattr(where, name)

    def counting(*args: Any, **more: Any) -> Any:
        calls[0] += 1
        return real(*args, **more)

    def asked() -> int:
        said, calls[0] = calls[0], 0
        return said

    monkeypatch.setattr(where, name, counting)
    return asked


@pytest.mark.slow
def test_a_pattern_is_tried_once_on_each_leaf_that_is_spelt_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = counted(monkeypatch, Pattern, "match")
    for layers, experts in ((6, 5), (12, 5), (6, 40)):
        plan = planned(layers, experts)
        assert tried() == len(plan.source.leaves)


@pytest.mark.slow
def test_shapes_are_read_and_steps_compiled_once_for_all_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch, compiler, "read_leaf"), counted(monkeypatch, named_leaf, "read_leaf")
    compiled = counted(monkeypatch, compiler.Compiler, "_step")
    planned(6, 5)
    few = [asked() for asked in (*read, compiled)]
    planned(60, 20)
    assert [asked() for asked in (*read, compiled)] == few


def test_what_is_alike_gets_the_steps_that_it_would_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alike = planned(7, 3)
    compiled = counted(monkeypatch, compiler.Compiler, "_step")
    real = compiler.LayerTensor
    monkeypatch.setattr(compiler, "LayerTensor", lambda *args: real(*args[:-1], True))
    monkeypatch.setattr(compiler, "uniform", lambda *_: False)
    alone = planned(7, 3)
    assert compiled() == sum(not step.tied for step in alone.steps)
    assert alike.steps == alone.steps
    assert {step.siblings for step in alike.steps} == {1, 2, 6}
    assert {part.at for step in alike.steps for part in step.parts} > {"s=2", "s=2, t=1", "s=2, X=1", "s=2, X=1, G=1"}
    assert alike.notes == alone.notes
    for one, other in zip(alike.steps, alone.steps, strict=True):
        assert [part.rule and part.rule.at for part in one.parts] == [
            part.rule and part.rule.at for part in other.parts
        ]


def test_elements_that_are_not_alike_are_compiled_alone() -> None:
    both = rule_file(
        '- {einsum: "...D,DNH->...NH", from: "{q,k}", linear: {module: "l.{N}.qk", axes: "(N (H + H)) D"}}'
    )
    plan = make_plan(both, MemorySource({x: np.zeros((4, 2, 3), np.float32) for x in "qk"}))
    assert [[part.at for part in step.parts] for step in plan.steps] == [["N=0", "N=0", "N=1", "N=1"]] * 2
    rows = rule_file('- {einsum: "...D,DH->...H", from: "{q,k}", stacked: {s: 0}, linear: "l.{s}.qk"}')
    with pytest.raises(PlanError, match=r"l\.2\.qk\.weight: element 2 of axis 0 is not in float32\[2,4,3\]"):
        make_plan(rows, MemorySource({"q": np.zeros((3, 4, 3), np.float32), "k": np.zeros((2, 4, 3), np.float32)}))


def test_what_is_said_of_one_leaf_is_not_said_of_another() -> None:
    head = "model: m\ntitle: M\nfacts: {rows: 10}\ntargets: {torch: {loads: T}}\n"
    rules = rule_file('- {from: "t_{i}", axes: VD, rows: $rows, padded: [12], embedding: "e.{i}"}', head)
    plan = make_plan(rules, MemorySource({f"t_{i}": np.zeros((12, 4), np.float32) for i in range(3)}))
    assert [step.notes[0].partition(";")[0] for step in plan.steps] == [
        f"e.{i}.weight keeps rows 0 to 9 of 12 of t_{i}" for i in range(3)
    ]


def test_what_is_folded_into_one_weight_is_not_folded_into_another() -> None:
    rules = '- {einsum: "...D,DF->...F", from: "l_{i}/w", weight_norm: "l_{i}/g", linear: "l.{i}"}'
    leaves = {f"l_{i}/{name}": np.zeros(shape) for i in range(3) for name, shape in (("w", (4, 6)), ("g", (6,)))}
    plan = make_plan(rule_file(rules), MemorySource(leaves))
    folded = [op.scale.leaf for step in plan.steps for op in step.parts[0].ops if isinstance(op, WeightNorm)]
    assert folded == [f"l_{i}/g" for i in range(3)]


def test_a_merged_leaf_is_written_in_the_dtype_of_its_own() -> None:
    pair = '{einsum: "...D,DR,RF->...F", from: "l_{i}/a", times: "l_{i}/b", scale: 1}'
    rules = f'- {{einsum: "...D,DF->...F", from: "l_{{i}}/w", plus: {pair}, linear: "l.{{i}}"}}'
    shapes = {"w": (4, 6), "a": (4, 2), "b": (2, 6)}
    dtypes = (np.float32, np.float16, np.float32)
    leaves = {f"l_{i}/{n}": np.zeros(shape, dtypes[i]) for i in range(3) for n, shape in shapes.items()}
    plan = make_plan(rule_file(rules), MemorySource(leaves))
    assert [step.spec.dtype for step in plan.steps] == ["float32", "float16", "float32"]


def test_each_leaf_that_contradicts_the_others_is_a_finding() -> None:
    tree = mixture(6, 5)
    odd = ["l_1/e_3/gate/w", "l_4/e_0/gate/w", "l_4/e_2/gate/w"]
    tree |= {name: np.zeros((4, 7), np.float32) for name in odd} | {"l_2/e_1/gate/w": np.zeros((5, 6), np.float32)}
    with pytest.raises(PlanError) as caught:
        make_plan(rule_file(RULES), MemorySource(tree))
    assert [finding.path for finding in caught.value.findings] == [
        "l_1/e_3/gate/w",
        "l_2/e_1/gate/w",
        "l_4/e_0/gate/w",
        "l_4/e_2/gate/w",
    ]


def test_a_misfit_is_said_of_the_first_leaf_that_has_it() -> None:
    tree = mixture(6, 5) | {name: np.zeros((4, 6, 1), np.float32) for name in ("l_4/e_2/up/w", "l_3/e_1/up/w")}
    with pytest.raises(PlanError, match=r"l_3/e_1/up/w: float32\[4,6,1\] does not fit") as caught:
        make_plan(rule_file(RULES), MemorySource(tree))
    assert not any("l_4" in str(finding) for finding in caught.value.findings)


def test_metadata_of_arrays_is_parsed_once_for_each_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    parsed = counted(monkeypatch, zarr_metadata, "encoding")
    for layers in (2, 9):
        tree = {
            f"l_{i}": {"kernel": np.zeros((3, 4), np.float32), "bias": np.zeros(4, np.float32)} for i in range(layers)
        }
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / str(layers), args=ocp.args.PyTreeSave(tree))
        zarr_metadata._parse.cache_clear()
        source = open_source(tmp_path / str(layers))
        assert len(source.leaves) == 2 * layers and parsed() == 2
        assert len({id(leaf.spec) for leaf in source.leaves.values()}) == 2
        assert len({id(key) for leaf in source.leaves.values() for key in leaf.keys}) == layers + 2


def test_lines_are_printed_as_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"line {k}\ttab" for k in range(2500)] + ["\x1b[31mred", "", "ä\u202e"]
    output.data_lines(lines)
    many = capsys.readouterr().out
    for line in lines:
        output.data_lines([line])
    assert many == capsys.readouterr().out
    assert many.endswith("\\x1b[31mred\n\nä\\u202e\n")


def test_json_is_printed_as_in_one(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"tensors": [{"name": f"t{k}", "bytes": [k, 1.5], "tied": None} for k in range(5000)], "ä": "\x1b"}
    output.data_json(value)
    printed = capsys.readouterr().out

    assert printed == json.dumps(value, indent=2) + "\n"
