"""Level 2: correct conversions at every dtype pass; planted damage is found, and named; the header's claims are checked."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from convert.api import plan_conversion
from convert.checkpoints.chunks import Grid
from convert.checkpoints.source import Leaf, Source
from convert.core.tensor_spec import TensorSpec
from convert.numerics.special_values import count_special_values
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.rules.library import shipped_rules_dir
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.weights.corruption.find import find_corruption
from convert.verify.weights.corruption.relations import MAX_ROWS
from convert.verify.weights.tied import compare_tensors
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.goldens import checkpoint
from support.marks import slow_but
from support.memory_source import HEAD, MemorySource, rule_file
from support.weights_level import check_weights

Tensors = dict[str, np.ndarray]
Edit = Callable[[Tensors], object]
SETTINGS: dict[str, dict[str, Any]] = {
    "timesfm-1.0": {"use_positional_embedding": True},
    "timesfm-2.0": {"use_positional_embedding": False},
    "timesfm-2.5": {},
}


def planned(case: str, **options: Any) -> Plan:
    return plan_conversion("timesfm", checkpoint(case), settings=SETTINGS[case], **options)


def write(plan: Plan, out: Path) -> Path:
    for _ in execute(plan, out):
        pass
    return out


def edit_file(out: Path, edit: Edit, metadata: dict[str, str] | None = None) -> None:
    """Rewrites a file with other tensors; the header stays, unless another is given."""
    with safe_open(out, "np") as file:
        said = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    edit(tensors)
    save_file(
        {name: np.array(x, order="C") for name, x in tensors.items()}, out, said if metadata is None else metadata
    )


def checked(plan: Plan, out: Path) -> LevelReport:
    return check_weights(plan, open_written(out))


# ---- no false alarm


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("to", ["timesfm", "transformers"])
@pytest.mark.parametrize("case", SETTINGS)
def test_correct_conversions_pass(case: str, to: str, dtype: str | None, tmp_path: Path) -> None:
    plan = planned(case, to=to, dtype=dtype)
    level = checked(plan, write(plan, tmp_path / "out.safetensors"))
    assert level.verdict is Verdict.PASSED and level.findings == ()
    assert level.notes[0] == f"{len(plan.steps)} of {len(plan.steps)} tensors compared bit for bit"
    subnormal = [note for note in level.notes[1:] if "subnormal" in note]
    assert list(level.notes[1:]) == subnormal and bool(subnormal) <= (dtype == "float16")


# ---- damage, and its name

OUT, FF0, FF1, QKV = (f"stacked_xf.1.{name}.weight" for name in ("attn.out", "ff0", "ff1", "attn.qkv_proj"))
NORM, PLAIN = (f"stacked_transformer.layers.1.{name}.weight" for name in ("mlp.layer_norm", "input_layernorm"))
BIAS = "stacked_transformer.layers.1.self_attn.o_proj.bias"
NORM_LEAF = "mdl_vars/params/stacked_transformer_layer/x_layers_1/ff_layer/layer_norm/scale"


def change(name: str, make: Callable[[np.ndarray], Any]) -> Edit:
    def edit(tensors: Tensors) -> None:
        tensors[name] = np.asarray(make(tensors[name].copy()), tensors[name].dtype)

    return edit


def assign(at: Any, value: float) -> Callable[[np.ndarray], np.ndarray]:
    def make(x: np.ndarray) -> np.ndarray:
        x[at] = value
        return x

    return make


def flip_bit(x: np.ndarray) -> np.ndarray:
    x.view(np.uint32)[3, 7] ^= 1 << 9
    return x


def swap_layers(tensors: Tensors) -> None:
    a, b = "stacked_xf.0.ff0.weight", "stacked_xf.2.ff0.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def folded_in_bfloat16(tensors: Tensors) -> None:
    scale = planned("timesfm-1.0").source.read(NORM_LEAF).astype(ml_dtypes.bfloat16)
    tensors[NORM] = (scale + ml_dtypes.bfloat16(1)).astype(np.float32)


def without_rounding(tensors: Tensors) -> None:
    """The source's own scale, as a conversion without the addition has it: bit for bit, no subtraction."""
    tensors[NORM] = planned("timesfm-1.0").source.read(NORM_LEAF).copy()


FAULTS: dict[str, tuple[str, Edit, str, str]] = {
    "a square projection transposed": ("timesfm-2.5", change(OUT, lambda x: x.T), "transposed", OUT),
    "heads and features swapped": (
        "timesfm-2.5",
        change(OUT, lambda x: x.reshape(32, 4, 8).transpose(0, 2, 1).reshape(32, 32)),
        "axes of a head swapped",
        OUT,
    ),
    "key, query, value": (
        "timesfm-2.5",
        change(QKV, lambda x: np.concatenate([x[32:64], x[:32], x[64:]])),
        "fused parts in another order",
        QKV,
    ),
    "two layers swapped": ("timesfm-2.5", swap_layers, "of another layer", "stacked_xf.0.ff0.weight"),
    "another tensor": ("timesfm-2.5", lambda t: t.update({FF0: t[FF1]}), "of another tensor", FF0),
    "1+scale missing": ("timesfm-1.0", without_rounding, "1+scale missing", NORM),
    "1+scale missing, by subtraction": ("timesfm-1.0", change(NORM, lambda x: x - 1), "1+scale missing", NORM),
    "1+scale doubled": ("timesfm-1.0", change(NORM, lambda x: x + 1), "1+scale doubled", NORM),
    "1+scale on a plain norm": ("timesfm-1.0", change(PLAIN, lambda x: x + 1), "1+scale on a plain norm", PLAIN),
    "folded in bfloat16": ("timesfm-1.0", folded_in_bfloat16, "folded in bfloat16", NORM),
    "rounded through bfloat16": (
        "timesfm-2.5",
        change(FF0, lambda x: x.astype(ml_dtypes.bfloat16)),
        "rounded through bfloat16",
        FF0,
    ),
    "rounded through float16": (
        "timesfm-2.5",
        change(FF0, lambda x: x.astype(np.float16)),
        "rounded through float16",
        FF0,
    ),
    "bias dropped": ("timesfm-1.0", change(BIAS, np.zeros_like), "bias dropped", BIAS),
    "one bit flipped": ("timesfm-2.5", change(FF0, flip_bit), "one bit flipped", FF0),
    "one value changed": ("timesfm-2.5", change(FF0, assign((3, 7), 0.7)), "one value changed", FF0),
    "one row zeroed": ("timesfm-2.5", change(FF0, assign(5, 0)), "row zeroed", FF0),
    "a matrix of zeros": ("timesfm-2.5", change(FF0, np.zeros_like), "all zeros", FF0),
    "a norm of zeros": ("timesfm-1.0", change(PLAIN, np.zeros_like), "all zeros", PLAIN),
    "halves of rows swapped": ("timesfm-2.5", change(FF0, lambda x: np.roll(x, 16, 0)), "halves swapped", FF0),
    "rows rolled": ("timesfm-2.5", change(FF0, lambda x: np.roll(x, 3, 0)), "rows rolled", FF0),
    "columns rolled back": ("timesfm-2.5", change(FF0, lambda x: np.roll(x, -1, 1)), "rows rolled", FF0),
    "rows in no order": (
        "timesfm-2.5",
        change(FF0, lambda x: x[[1, 4, 0, 2, 3, *range(5, 32)]]),
        "rows in another order",
        FF0,
    ),
    "rows reversed": ("timesfm-2.5", change(FF0, lambda x: x[::-1]), "rows reversed", FF0),
    "parts of a fused tensor within each head": (
        "timesfm-2.5",
        change(QKV, lambda x: x.reshape(3, 4, 8, 32).swapaxes(0, 1).reshape(96, 32)),
        "parts within heads",
        QKV,
    ),
    "NaN": ("timesfm-2.5", change(FF0, assign((0, 0), np.nan)), "NaN or Inf", FF0),
    "NaNs": ("timesfm-2.5", change(FF0, assign((slice(3), 4), np.nan)), "NaN or Inf", FF0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_named(fault: str, tmp_path: Path) -> None:
    case, edit, diagnosis, name = FAULTS[fault]
    plan = planned(case)
    out = write(plan, tmp_path / "out.safetensors")
    edit_file(out, edit)
    level = checked(plan, out)
    assert level.verdict is Verdict.FAILED
    (finding,) = level.findings
    assert (finding.data["diagnosis"], finding.path) == (diagnosis, name), str(finding)
    step = next(step for step in plan.steps if step.name == name)
    assert finding.rule == step.rule.line_only and finding.rule in str(finding)
    assert all(part.leaf in str(finding) for part in step.parts)


@pytest.mark.slow
def test_where_rows_were_moved_to_is_said() -> None:
    want = np.arange(20.0).reshape(10, 2)
    said = {k: (find_corruption(np.roll(want, k, 0), want) or pytest.fail()).description for k in (1, -2, 5)}
    assert said == {
        1: "the rows along axis 0 are moved forward by 1: index 0 holds 9",
        -2: "the rows along axis 0 are moved back by 2: index 0 holds 2",
        5: "the two halves of the rows along axis 0, of 5 each, are exchanged",
    }
    table = np.random.default_rng(0).normal(size=(MAX_ROWS + 6, 2)).astype(np.float32)  # Gemma 3 has 262,144 rows
    for k, said_of_it in (
        (1, f"moved forward by 1: index 0 holds {MAX_ROWS + 5}"),
        (-4, "moved back by 4: index 0 holds 4"),
    ):
        found = find_corruption(np.roll(table, k, 0), table)
        assert found is not None and said_of_it in found.description and found.name == "rows rolled"
    found = find_corruption(np.roll(table, len(table) // 2, 0), table)
    assert found is not None and found.name == "halves swapped"
    found = find_corruption(table[::-1].copy(), table)
    assert found is not None and found.name == "rows reversed"


def test_one_mistake_in_many_tensors_is_one_finding(tmp_path: Path) -> None:
    plan = planned("timesfm-2.5")
    out = write(plan, tmp_path / "out.safetensors")
    names = [f"stacked_xf.{i}.attn.out.weight" for i in range(3)]
    edit_file(out, lambda t: t.update({name: t[name].T for name in names}))
    (finding,) = checked(plan, out).findings
    assert finding.data["tensors"] == names
    assert finding.problem == f"transposed; the same in all 2 other tensors of this rule: {names[1]}, {names[2]}"


def test_what_has_no_name_says_so(tmp_path: Path) -> None:
    plan = planned("timesfm-2.5")
    out = write(plan, tmp_path / "out.safetensors")
    edit_file(out, change(FF0, lambda x: x + np.sin(100 * x) / 4))
    (finding,) = checked(plan, out).findings
    assert finding.code == "weights-differ" and finding.got == "1024 of 1024 values differ"
    assert finding.problem == "no known mistake gives these values" and finding.data["diagnosis"] == ""


@pytest.mark.slow
def test_all_damaged_is_not_diagnosed_for_hours(tmp_path: Path) -> None:
    """After some tensors that nothing explains, the rest is counted and no more."""
    plan = planned("timesfm-2.5")
    out = write(plan, tmp_path / "out.safetensors")
    edit_file(out, lambda t: t.update({name: np.sin(100 * x + 1) for name, x in t.items()}))
    (finding,) = checked(plan, out).findings
    assert sorted(finding.data["tensors"]) == sorted(step.name for step in plan.steps)
    assert "values unrelated to those of the source" in finding.problem and "44 more tensors" in finding.problem
    assert finding.rule == ""  # no rule is to blame


def test_negative_zero_is_not_zero(tmp_path: Path) -> None:
    plan = make_plan(rule_file("- parameter: p\n  from: p"), MemorySource({"p": np.zeros(3, np.float32)}))
    out = write(plan, tmp_path / "out.safetensors")
    assert checked(plan, out).verdict is Verdict.PASSED
    edit_file(out, lambda t: t.update(p=np.array([0, -0.0, 0], np.float32)))
    assert checked(plan, out).findings[0].data["diagnosis"] == "one bit flipped"


def test_integers_and_scalars(tmp_path: Path) -> None:
    tree = {
        "n": np.array(7),
        "table": np.arange(6, dtype=np.int32).reshape(2, 3),
        "empty": np.zeros((0, 3), np.float32),
    }
    plan = make_plan(rule_file("\n".join(f"- parameter: {name}\n  from: {name}" for name in tree)), MemorySource(tree))
    out = write(plan, tmp_path / "out.safetensors")
    assert checked(plan, out).verdict is Verdict.PASSED
    edit_file(out, lambda t: t.update(n=np.array(8)))
    (finding,) = checked(plan, out).findings
    assert finding.path == "n"


def test_computed_buffers_are_compared(tmp_path: Path) -> None:
    """No leaf holds the timescales: they are computed again."""
    plan = planned("timesfm-1.0", to="transformers")
    (step,) = (step for step in plan.steps if step.value is not None)
    out = write(plan, tmp_path / "out.safetensors")
    edit_file(out, change(step.name, lambda x: x[::-1]))
    (finding,) = checked(plan, out).findings
    assert finding.path == step.name and finding.data["diagnosis"] == "another buffer"
    assert finding.rule == step.rule.line_only and finding.expected == "the values that the rule computes"


# ---- what cannot be compared


def test_a_missing_tensor_is_no_pass(tmp_path: Path) -> None:
    """The coverage level names it; the weights level must not say that all is well when it is asked alone."""
    plan = planned("timesfm-2.5")
    out = write(plan, tmp_path / "out.safetensors")
    edit_file(out, lambda t: t.pop(FF0))
    level = checked(plan, out)
    assert level.verdict is Verdict.FAILED and level.notes[0] == "44 of 45 tensors compared bit for bit"
    (finding,) = level.findings
    assert finding.data == {"diagnosis": "not compared", "tensors": [FF0]} and FF0 in str(finding)


def test_nothing_to_compare_is_a_skip(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    save_file({"x": np.zeros(2, np.float32)}, out)
    level = checked(planned("timesfm-2.5"), out)
    assert level.verdict is Verdict.SKIPPED and "see coverage" in level.reason


def test_values_that_the_files_dtype_cannot_hold(tmp_path: Path) -> None:
    rules = rule_file("- parameter: p\n  from: p")
    source = MemorySource({"p": np.array([1.0, 1e6], np.float32)})
    out = tmp_path / "out.safetensors"
    save_file({"p": np.array([1.0, np.inf], np.float16)}, out)
    (finding,) = checked(make_plan(rules, source, dtype="float16"), out).findings
    assert finding.data["diagnosis"] == "overflow" and "1 of 2 values do not fit float16" in str(finding)


# ---- notes: the source has them too


def test_odd_values_of_the_source_are_notes(tmp_path: Path) -> None:
    tree = {
        "nan": np.array([np.nan, 1, np.nan], np.float32),
        "inf": np.array([np.inf, -np.inf, np.inf], np.float32),
        "zero": np.zeros((2, 2), np.float32),
        "tiny": np.array([1e-40, 0, 1], np.float32),
        "small": np.array([1e-5, 6.2e-5, 1], np.float16),
        "short": np.array([1e-39, 1], ml_dtypes.bfloat16),
        "plain": np.array([0, 1e-30], np.float32),
        "whole": np.zeros(3, np.int32),
    }
    rules = "\n".join(f"- parameter: {name}\n  from: {name}" for name in tree)
    plan = make_plan(rule_file(rules), MemorySource(tree))
    level = checked(plan, write(plan, tmp_path / "out.safetensors"))
    assert level.verdict is Verdict.PASSED
    assert level.notes[1:] == (
        "nan has 2 NaN values, as the source",
        "inf has 3 infinite values, as the source",
        "zero is all zeros, as in the source",
        "tiny has 1 subnormal values, which some devices flush to zero",
        "small has 1 subnormal values, which some devices flush to zero",
        "short has 1 subnormal values, which some devices flush to zero",
    )


def test_odd_values_of_a_wrong_tensor_are_not_blamed_on_the_source(tmp_path: Path) -> None:
    plan = planned("timesfm-2.5")
    out = write(plan, tmp_path / "out.safetensors")
    edit_file(out, change(QKV, assign(slice(0, 32), np.nan)))  # the rows of the first part; the last one is right
    assert not any("as the source" in note for note in checked(plan, out).notes)


# ---- provenance


def test_another_checkpoint(tmp_path: Path) -> None:
    plan = planned("timesfm-2.5")
    other = {name: plan.source.read(name) for name in plan.source.leaves}
    other["stacked_xf/ff0/kernel/value"] = other["stacked_xf/ff0/kernel/value"] * 2
    out = write(make_plan(plan.rules, MemorySource(other)), tmp_path / "out.safetensors")
    first, second = checked(plan, out).findings
    assert first.data["diagnosis"] == "another checkpoint" and "another checkpoint or step" in first.problem
    assert second.data["diagnosis"] == "multiplied by a number"
    assert second.data["tensors"] == [f"stacked_xf.{i}.ff0.weight" for i in range(3)]


def test_a_leaf_that_another_dtype_rounds_alike(tmp_path: Path) -> None:
    """The written bytes agree, and still the file is of another checkpoint."""
    source = {"p": np.array([1.0, 2.0], np.float64)}
    rules = rule_file("- parameter: p\n  from: p\n  dtype: float32")
    out = write(make_plan(rules, MemorySource({"p": source["p"].astype(np.float32)})), tmp_path / "out.safetensors")
    (finding,) = checked(make_plan(rules, MemorySource(source)), out).findings
    assert finding.data["diagnosis"] == "another checkpoint"


def with_rules(tmp_path: Path, old: str, new: str) -> Plan:
    text = (shipped_rules_dir() / "timesfm-2.5.yaml").read_text()
    assert old in text
    path = tmp_path / "timesfm-2.5.yaml"
    path.write_text(text.replace(old, new))
    return plan_conversion(str(path), checkpoint("timesfm-2.5"))


def test_rules_with_another_comment_are_a_note(tmp_path: Path) -> None:
    out = write(planned("timesfm-2.5"), tmp_path / "out.safetensors")
    level = checked(with_rules(tmp_path, "\ntitle: ", "\n# A new comment.\ntitle: "), out)
    assert level.verdict is Verdict.PASSED
    assert "the text of the rules has changed since the conversion" in level.notes[1]


def test_rules_with_another_fact(tmp_path: Path) -> None:
    """The weights agree and the target would be configured differently."""
    out = write(planned("timesfm-2.5"), tmp_path / "out.safetensors")
    (finding,) = checked(with_rules(tmp_path, "rope_theta: 10000.0", "rope_theta: 1000.0"), out).findings
    assert finding.data["diagnosis"] == "other rules" and "their facts differ" in str(finding)


def test_rules_with_another_equation(tmp_path: Path) -> None:
    out = write(planned("timesfm-2.5"), tmp_path / "out.safetensors")
    claim, wrong = checked(with_rules(tmp_path, "...D,DF->...F", "...F,DF->...D"), out).findings
    assert claim.data["diagnosis"] == "other rules"
    assert wrong.data["diagnosis"] == "transposed" and wrong.path == "stacked_xf.0.ff0.weight"


def test_rules_that_use_other_leaves(tmp_path: Path) -> None:
    """Then the digest says nothing about the checkpoint, and no finding claims that it is another one."""
    tree = {"p": np.ones(2, np.float32), "q": np.ones(3, np.float32)}
    both = rule_file("- parameter: p\n  from: p\n- parameter: q\n  from: q")
    one = rule_file("- parameter: p\n  from: p\n- drop: q\n  because: unused")
    out = write(make_plan(both, MemorySource(tree)), tmp_path / "out.safetensors")
    level = checked(make_plan(one, MemorySource(tree)), out)
    assert any("it is unknown whether the checkpoint is the same" in note for note in level.notes)
    assert [finding.data["diagnosis"] for finding in level.findings] == ["other rules"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"settings": {"rope_theta": 500.0}}, "other --set"),
        ({"to": "transformers"}, "other target"),
        ({"dtype": "bfloat16"}, "other --dtype"),
    ],
)
def test_other_settings(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    out = write(planned("timesfm-2.5"), tmp_path / "out.safetensors")
    level = checked(plan_conversion("timesfm", checkpoint("timesfm-2.5"), **options), out)
    assert level.verdict is Verdict.FAILED
    assert said in [finding.data["diagnosis"] for finding in level.findings]


def test_a_file_by_other_code_claims_nothing(tmp_path: Path) -> None:
    plan = planned("timesfm-2.5")
    out = write(plan, tmp_path / "out.safetensors")
    edit_file(out, lambda t: None, metadata={"format": "pt"})
    level = checked(plan, out)
    assert level.verdict is Verdict.PASSED
    assert level.notes[1] == "the file does not record its checkpoint"


def test_a_setting_that_the_conversion_left_open(tmp_path: Path) -> None:
    """The tree does not tell whether 1.0 embeds positions; the conversion need not know, the model does."""
    plan = plan_conversion("timesfm", checkpoint("timesfm-1.0"))
    level = checked(planned("timesfm-1.0"), write(plan, tmp_path / "out.safetensors"))
    assert level.verdict is Verdict.PASSED
    assert "more settings than the conversion (--set use_positional_embedding=true)" in level.notes[1]


# ---- memory

LEAVES, ROWS = 10, 2720  # ten leaves of 29.6 MB


class Generated(Source):
    """Leaves that exist while they are read."""

    format = "generated"

    def __init__(self) -> None:
        self.path = Path("/generated")
        self.leaves = {f"w_{k}": Leaf((f"w_{k}",), TensorSpec((ROWS, ROWS), "float32")) for k in range(LEAVES)}

    def read(self, name: str) -> np.ndarray:
        start = int(name.removeprefix("w_"))
        return np.arange(start, start + ROWS * ROWS, dtype=np.float32).reshape(ROWS, ROWS)


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
def test_memory_is_that_of_a_few_leaves(tmp_path: Path, traced: None) -> None:
    """300 MB in ten leaves, each of them transposed: the leaf, the comparison, and two that are read ahead."""
    rules = rule_file('- einsum: "...I,IO->...O"\n  from: w_{i}\n  linear: l.{i}', HEAD)
    plan = make_plan(rules, Generated())
    out = write(plan, tmp_path / "out.safetensors")
    leaf = 4 * ROWS * ROWS
    assert out.stat().st_size > 290e6
    tracemalloc.reset_peak()
    level = checked(plan, out)
    assert level.verdict is Verdict.PASSED
    peak = tracemalloc.get_traced_memory()[1]
    assert peak < 4.25 * leaf, f"{peak / leaf:.2f} leaves"


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "all values are multiplied by 16": lambda x: x * np.float32(16),
    "values unrelated to those of the source": lambda x: np.random.default_rng(1).standard_normal(x.shape, np.float32),
}


@pytest.mark.slow
@pytest.mark.parametrize("said", slow_but(["all values are multiplied by 16"], CHANGES))
def test_the_cause_of_a_wrong_table_takes_the_memory_of_a_few_tables(said: str, tmp_path: Path, traced: None) -> None:
    """Of Gemma 3 1B's embedding, 0.6 GB, the same search would take more than 13 GB if each value were held in float64 several times."""
    table = np.random.default_rng(0).standard_normal((18000, 256), np.float32).astype(ml_dtypes.bfloat16)
    rules = rule_file("- from: e\n  embedding: embed\n  axes: VD", HEAD)
    wrong = CHANGES[said](table.astype(np.float32)).astype(table.dtype)
    out = write(make_plan(rules, MemorySource({"e": wrong})), tmp_path / "out.safetensors")
    del wrong
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    level = checked(make_plan(rules, MemorySource({"e": table})), out)
    assert any(said in finding.problem for finding in level.findings), level.findings
    peak = (tracemalloc.get_traced_memory()[1] - before) / table.nbytes
    assert peak < 18, f"{peak:.1f} tables"  # 16 MB of blocks in float64, twice


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_odd_values_are_counted_by_their_bits(dtype: str) -> None:
    info = ml_dtypes.finfo(dtype)
    tiny, smallest = float(info.smallest_subnormal), float(info.smallest_normal)
    values = [0.0, -0.0, tiny, -tiny, smallest, -smallest, 1.0, float(info.max), np.nan, -np.nan]
    values += [np.inf, -np.inf, np.inf] if dtype != "float8_e4m3fn" else []  # it has none
    x = np.array(values).astype(getattr(ml_dtypes, dtype, None) or dtype)
    want = {"zero": 2, "subnormal": 2, "infinite": 3 if dtype != "float8_e4m3fn" else 0, "NaN": 2}
    assert count_special_values(x) == count_special_values(np.tile(x, (2, 1))[:1].T) == want
    assert count_special_values(x[4:8]) == {"zero": 0, "subnormal": 0}


class Chunked(MemorySource):
    """The same values, stored in chunks of two rows."""

    def chunks(self, name: str) -> Grid:
        shape = self.leaves[name].spec.shape
        return Grid(shape, (2, *shape[1:]))


def test_the_same_values_in_other_chunks_are_a_note(tmp_path: Path) -> None:
    values = {"p": np.arange(35, dtype=np.float32).reshape(5, 7)}
    rules = rule_file("- parameter: p\n  from: p")
    out = write(make_plan(rules, MemorySource(values)), tmp_path / "out.safetensors")
    level = checked(make_plan(rules, Chunked(values)), out)
    assert level.verdict is Verdict.PASSED
    assert any("stored in another way" in note and "digest" in note for note in level.notes)


def test_rows_that_were_cut_off_make_it_another_checkpoint(tmp_path: Path) -> None:
    """No tensor holds them, so that equal tensors do not tell that the checkpoint is the same."""
    values = {"t": np.arange(60, dtype=np.float32).reshape(20, 3)}
    other = {"t": np.concatenate([values["t"][:16], -values["t"][16:]])}
    head = HEAD + "facts: {vocab: 16}\n"
    rules = rule_file("- embedding: e\n  from: t\n  rows: $vocab\n  padded: [20]", head)
    out = write(make_plan(rules, MemorySource(values)), tmp_path / "out.safetensors")
    (finding,) = checked(make_plan(rules, MemorySource(other)), out).findings
    assert finding.data["diagnosis"] == "another checkpoint"


def test_counters_of_tied_modules_are_compared() -> None:
    """A BatchNorm that stands under two names has a counter without axes: the comparison stopped with an error."""
    assert compare_tensors(np.array(3), np.array(3)) == (0, 0.0)
    assert compare_tensors(np.array(3), np.array(5)) == (1, 2.0)
