"""Level 3: JAX's own operations with the source's weights against torch's with the written ones.

The faults here are of the plan: the file is what the plan makes, so the weights level is content, and this one must not be.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.api import plan_conversion
from convert.checkpoints.chunks import Box
from convert.core.ops import Flip, Op, Permute, Take
from convert.core.value_ops import Add
from convert.layers import probe
from convert.layers.base import Part
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.verify.layers import level as layers
from convert.verify.layers.level import check_layers
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.weights.level import WeightsPass
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.goldens import checkpoint
from support.marks import slow_but
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights

RULES = """
- embedding: embed
  from: embed/table
- einsum: ...D,DNH->...NH
  from: layers_{i}/{query,key,value}/w
  bias: layers_{i}/{query,key,value}/b
  linear: layers.{i}.qkv
- einsum: ...NH,NHD->...D
  from: layers_{i}/out/w
  bias: layers_{i}/out/b
  linear: layers.{i}.out
- from: layers_{i}/norm/scale
  multiplies_by: 1+scale
  epsilon: 1e-6
  rms_norm: layers.{i}.norm
- from: final/scale
  bias: final/bias
  multiplies_by: scale
  epsilon: 1e-5
  layer_norm: final
- einsum: ...D,CDF->C...F
  from: stack/gate
  stacked: {i: 0}
  activation: gelu_tanh
  linear: ff.{i}.{gate,up}
- from: theta
  parameter: theta
"""
D, N, H, F = 16, 4, 4, 16


def tree(stored: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(stored)

    made = {"embed/table": random(20, D), "final/scale": random(D), "final/bias": random(D), "theta": random(3)}
    made["stack/gate"] = random(2, 2, D, F)
    for i in range(2):
        for name in ("query", "key", "value"):
            made |= {f"layers_{i}/{name}/w": random(D, N, H), f"layers_{i}/{name}/b": random(N, H)}
        made |= {
            f"layers_{i}/out/w": random(N, H, D),
            f"layers_{i}/out/b": random(D),
            f"layers_{i}/norm/scale": random(D),
        }
    return made


def small(stored: Any = np.float32, **options: Any) -> Plan:
    return make_plan(rule_file(RULES), MemorySource(tree(stored)), **options)


def checked(plan: Plan, out: Path, against: Plan | None = None) -> LevelReport:
    for _ in execute(plan, out):
        pass
    return check_layers(against or plan, open_written(out))


# ---- no false alarm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("timesfm-1.0", {}),
        ("timesfm-2.5", {"to": "transformers"}),
        ("timesfm-2.5", {"dtype": "bfloat16"}),
        ("timesfm-1.0", {"dtype": "float16", "to": "transformers"}),
    ],
)
def test_correct_conversions_pass(case: str, options: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_conversion("timesfm", checkpoint(case), **options)
    level = checked(plan, tmp_path / "out.safetensors")
    assert level.verdict is Verdict.PASSED and level.findings == ()
    assert all(measure.float64 is not None and measure.excess < 1 for measure in level.measures)
    rules = {measure.rule for measure in level.measures if measure.rule}
    assert rules == {step.rule.line_only for step in plan.steps if step.parts}  # every rule was run


@pytest.mark.slow
@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
@pytest.mark.parametrize("dtype", slow_but([None], [None, "bfloat16", "float16"]))
def test_every_dtype_passes(stored: Any, dtype: str | None, tmp_path: Path) -> None:
    level = checked(small(stored, dtype=dtype), tmp_path / "out.safetensors")
    assert level.verdict is Verdict.PASSED, level.findings
    exact = dtype is None and stored is not np.float64
    moved = [m for m in level.measures if m.float64_tolerance is not None and m.name.startswith(("layers.0.out", "ff"))]
    assert moved and all(m.float64 is not None and (m.float64.relative < 1e-14 or not exact) for m in moved)


def test_what_is_shown(tmp_path: Path) -> None:
    level = checked(small(), tmp_path / "out.safetensors")
    assert level.notes == ("26 tensors and parts of fused tensors in 10 groups; the worst of each is shown",)
    assert [m.name for m in level.measures if not m.rule] == ["gelu_tanh (after ff.{i}.{gate,up})"]
    norm = next(m for m in level.measures if "norm" in m.name)
    assert norm.float64_tolerance is not None and "rounded once to float32 after '+ 1'" in norm.float64_tolerance.why
    out = next(m for m in level.measures if "out.weight" in m.name)
    assert out.tolerance is not None and out.tolerance.why.startswith("8 x sqrt(16 summands) x eps(float32)")


def test_jax_is_left_as_it_was(tmp_path: Path) -> None:
    import jax

    assert not jax.config.read("jax_enable_x64")
    checked(small(), tmp_path / "out.safetensors")
    assert not jax.config.read("jax_enable_x64")
    with jax.enable_x64(True):  # of this thread alone
        checked(small(), tmp_path / "more.safetensors")
        assert jax.config.read("jax_enable_x64")
    assert not jax.config.read("jax_enable_x64")


# ---- tampered plans: what the rule declares is not what the operations do

Change = Callable[[tuple[Part, ...]], Sequence[Part]]


def tampered(plan: Plan, name: str, change: Change) -> Plan:
    """The plan with other parts for one tensor; everything else that it says stays."""
    assert name in {step.name for step in plan.steps}
    steps = tuple(
        dataclasses.replace(step, parts=tuple(change(step.parts))) if step.name == name else step for step in plan.steps
    )
    return dataclasses.replace(plan, steps=steps)


def with_ops(change: Callable[[tuple[Op, ...]], Sequence[Op]]) -> Change:
    return lambda parts: [dataclasses.replace(part, ops=tuple(change(part.ops))) for part in parts]


def other_permutation(ops: tuple[Op, ...]) -> list[Op]:
    """N H D -> D H N for D N H: fits, for the result is flattened."""
    return [Permute((2, 1, 0)) if isinstance(op, Permute) else op for op in ops]


def other_element(axis: int, index: int) -> Callable[[tuple[Op, ...]], list[Op]]:
    return lambda ops: [Take(axis, index) if op == Take(axis, 1 - index) else op for op in ops]


def exchanged(parts: tuple[Part, ...]) -> list[Part]:
    """Each part with the leaf of the next."""
    leaves = [part.leaf for part in parts]
    return [dataclasses.replace(part, leaf=leaf) for part, leaf in zip(parts, leaves[1:] + leaves[:1], strict=True)]


OUT, QKV, NORM, GATE, UP, BIAS = (
    "layers.1.out.weight", "layers.1.qkv.weight", "layers.1.norm.weight", "ff.1.gate.weight", "ff.1.up.weight",
    "layers.1.qkv.bias",
)  # fmt: skip
TAMPERED: dict[str, tuple[str, Change, str]] = {  # tensor, change, and the code of the finding or what it got
    "transposed": (OUT, with_ops(lambda ops: [*ops, Permute((1, 0))]), "layer-differs"),
    "heads and features swapped": (OUT, with_ops(other_permutation), "layer-differs"),
    "not permuted at all": (
        OUT,
        with_ops(lambda ops: [op for op in ops if not isinstance(op, Permute)]),
        "layer-differs",
    ),
    "features in reverse order": (OUT, with_ops(lambda ops: [*ops, Flip((1,))]), "layer-differs"),
    "1+scale missing": (
        NORM,
        with_ops(lambda ops: [op for op in ops if not isinstance(op, Add)]),
        "layer-differs",
    ),
    "1+scale doubled": (NORM, with_ops(lambda ops: [*ops, Add(1.0)]), "layer-differs"),
    "1+scale on a plain norm": (
        "final.weight",
        with_ops(lambda ops: [Add(1.0), *ops]),
        "layer-differs",
    ),
    "another layer of the stack": (
        GATE,
        with_ops(other_element(0, 0)),
        "stack/gate at i=0, which belongs to ff.0.gate.weight",
    ),
    "gate for up": (
        UP,
        with_ops(lambda ops: [ops[0], Take(0, 0), *ops[2:]]),
        "stack/gate at i=1, which belongs to ff.1.gate.weight",
    ),
    "the leaf of another layer": (
        OUT,
        lambda parts: [dataclasses.replace(parts[0], leaf="layers_0/out/w")],
        "layers_0/out/w, which belongs to layers.0.out.weight",
    ),
    "query, key and value exchanged": (
        QKV,
        exchanged,
        "layers_1/key/w",
    ),
    "a bias in another order": (
        BIAS,
        with_ops(lambda ops: [Permute((1, 0)), *ops]),
        "layer-differs",
    ),
    "a bias of another leaf": (
        BIAS,
        exchanged,
        "layers_1/key/b",
    ),
    "an embedding in reverse order": ("embed.weight", with_ops(lambda ops: [*ops, Flip((0,))]), "layer-differs"),
    "a parameter in reverse order": (
        "theta",
        with_ops(lambda ops: [*ops, Flip((0,))]),
        "layer-differs",
    ),
}


@pytest.mark.parametrize("dtype", slow_but([None], [None, "bfloat16"]))
@pytest.mark.parametrize("case", TAMPERED)
def test_a_tampered_plan_is_caught(case: str, dtype: str | None, tmp_path: Path) -> None:
    name, change, wanted = TAMPERED[case]
    plan = tampered(small(dtype=dtype), name, change)
    level = checked(plan, tmp_path / "out.safetensors")
    assert (
        check_weights(plan, open_written(tmp_path / "out.safetensors")).verdict is Verdict.PASSED
    )  # consistent in itself
    assert level.verdict is Verdict.FAILED
    step = next(step for step in plan.steps if step.name == name)
    assert {finding.rule for finding in level.findings} == {step.rule.line_only}
    assert all(finding.path.partition("[")[0] == name for finding in level.findings)
    assert any(wanted in (finding.code, finding.got) for finding in level.findings), level.findings


@pytest.mark.slow
def test_a_wrong_file_is_caught_by_the_right_plan(tmp_path: Path) -> None:
    """The two more of its rule are counted, and the worst of them is shown."""
    plan = plan_conversion("timesfm", checkpoint("timesfm-2.5"))
    wrong = plan
    for i in range(3):
        wrong = tampered(wrong, f"stacked_xf.{i}.attn.out.weight", with_ops(lambda ops: [*ops, Permute((1, 0))]))
    level = checked(wrong, tmp_path / "out.safetensors", against=plan)
    (finding,) = level.findings
    assert "2 more tensors of this rule" in finding.problem
    assert finding.data["tensors"] == [f"stacked_xf.{i}.attn.out.weight" for i in range(3)]
    assert "relative error" in finding.got and "in float64" in finding.got and finding.expected and finding.fix
    assert level.first_failure is not None and level.first_failure.name == finding.path


@pytest.mark.parametrize("spoilt", [(), (0,), (1,), (0, 2), (0, 1, 2)])
def test_no_layer_stands_for_one_that_is_wrong(spoilt: tuple[int, ...], tmp_path: Path) -> None:
    """One layer of each kind is run before the weights level is done; it may turn out that it is not what the plan makes."""
    plan = plan_conversion("timesfm", checkpoint("timesfm-2.5"))
    names = [f"stacked_xf.{i}.attn.out.weight" for i in spoilt]
    wrong = plan
    for name in names:
        wrong = tampered(wrong, name, with_ops(lambda ops: [*ops, Permute((1, 0))]))
    for _ in execute(wrong, tmp_path / "out.safetensors"):
        pass
    written = open_written(tmp_path / "out.safetensors")
    with WeightsPass(plan, written) as weights:
        level = check_layers(plan, written, is_equal=weights.same)
    assert [finding.data["tensors"] for finding in level.findings] == ([names] if names else [])
    trusting = check_layers(plan, written, is_equal=lambda step, part: True)
    ran, least = (int(check.notes[-1].split()[0]) for check in (level, trusting))
    another = 0 in spoilt and len(spoilt) < plan.sizes["i"]  # in place of the first, which stands for itself alone
    assert ran == least + len({*spoilt} - {0}) + another
    assert "equal the plan's result bit for bit" in level.notes[-1]


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_a_norm_over_two_axes(kind: str, tmp_path: Path) -> None:
    """flax with ``feature_axes = reduction_axes = (-2, -1)``, as Equinox' and torch's ``LayerNorm((3, 5))``."""
    bias = "bias: m/bias, " if kind == "layer_norm" else ""
    rules = f"- {{from: m/scale, {bias}multiplies_by: scale, epsilon: 1e-6, {kind}: m}}"
    rng = np.random.default_rng(0)
    tree = {"m/scale": rng.random((3, 5)), **({"m/bias": rng.random((3, 5))} if bias else {})}
    plan = make_plan(rule_file(rules), MemorySource(tree))
    level = checked(plan, tmp_path / "out.safetensors")
    assert level.verdict is Verdict.PASSED, [str(finding) for finding in level.findings]
    assert all(measure.float64 is not None and measure.float64.relative < 1e-14 for measure in level.measures)
    turned = tampered(plan, "m.weight", with_ops(lambda ops: [*ops, Flip((0,))]))
    assert checked(turned, tmp_path / "turned.safetensors", against=plan).verdict is Verdict.FAILED


@pytest.mark.slow
@pytest.mark.parametrize(
    "equation", ["zd,dnh->znh", "d,dnh->nh", "znh,nhd->zd", "bdz,dc->bcz", "bd,dd->b", "bhd,hdc->bhc"]
)
@pytest.mark.parametrize("values", slow_but([30], [1, 30, 10**6]))
def test_a_product_in_blocks_is_the_product(equation: str, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.setattr(probe, "JAX_BLOCK", values)
    sizes, rng = {"b": 2, "d": 5, "n": 3, "h": 4, "c": 7, "z": 6}, np.random.default_rng(0)
    x, weight = (
        rng.standard_normal([sizes[letter] for letter in operand]) for operand in equation.split("->")[0].split(",")
    )
    with jax.enable_x64(True):
        made = probe.jnp_einsum(equation, "float32", x, weight)
    wanted = np.einsum(equation, x, weight)
    assert made["float64"].shape == wanted.shape and np.allclose(made["float64"], wanted, rtol=1e-14, atol=1e-14)
    assert made["float32"].dtype == np.float64 and 0 < np.abs(made["float32"] - wanted).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 19, 20])
def test_of_a_large_table_some_rows_are_looked_up(rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same rows on both sides: a table that is moved by one row does not pass."""
    monkeypatch.setattr(layers, "ROWS", rows)
    read: list[tuple[int, ...]] = []
    own = MemorySource.read_box

    def watched(self: MemorySource, name: str, box: Box) -> Any:
        read.append(box.shape)
        return own(self, name, box)

    monkeypatch.setattr(MemorySource, "read_box", watched)
    plan = small()
    level = checked(plan, tmp_path / "out.safetensors")
    assert level.verdict is Verdict.PASSED and (rows, D) in read
    moved = tampered(plan, "embed.weight", with_ops(lambda ops: [*ops, Flip((0,))]))
    level = checked(moved, tmp_path / "moved.safetensors", against=plan)
    assert [finding.path for finding in level.findings] == ["embed.weight"]


def test_shapes_that_do_not_fit_are_a_finding(tmp_path: Path) -> None:
    """Not an error of the check: the rule does not describe the operation."""
    plan = small()
    steps = [
        dataclasses.replace(s, parts=(dataclasses.replace(s.parts[0], ops=()),)) if s.name == GATE else s
        for s in plan.steps
    ]
    for _ in execute(plan, tmp_path / "out.safetensors"):
        pass
    level = check_layers(dataclasses.replace(plan, steps=tuple(steps)), open_written(tmp_path / "out.safetensors"))
    assert level.verdict is Verdict.FAILED and {finding.path for finding in level.findings} == {GATE}
    assert {finding.code for finding in level.findings} == {"layer-misplaced", "layer-not-run"}


# ---- skips


def test_without_jax_it_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    level = checked(small(), tmp_path / "out.safetensors")
    assert (level.verdict, level.reason) == (Verdict.SKIPPED, "jax is not installed")


def test_nothing_of_the_plan_in_the_file_is_a_skip(tmp_path: Path) -> None:
    other = make_plan(rule_file("- parameter: other\n  from: x"), MemorySource({"x": np.zeros(3, np.float32)}))
    level = checked(other, tmp_path / "out.safetensors", against=small())
    assert level.verdict is Verdict.SKIPPED and "see the coverage level" in level.reason
