"""The way back on small rule files: what comes back bit for bit, and what is refused, with its reason and the rule's line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import convert
from convert.checkpoints.chunks import Box
from convert.core.ops import Interleave, Slice, apply
from convert.core.tensor_spec import TensorSpec
from convert.reversing.plan import MadeLeaf
from convert.reversing.source import ReversedSource, Share
from support.memory_source import HEAD, MemorySource, rule_file

AXES = """axes:
  N: {is: heads, equals: 2}
  H: {is: width of a head, equals: 4}
  K: {is: key heads, equals: 1}
"""
# rule, leaves; `@` is the number of the rule, so that several of one kind have different leaves
KINDS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "table": ("from: t@\n  axes: VD\n  embedding: t@", {"t@": (5, 6)}),
    "tied": ("from: t@\n  axes: VD\n  embedding: {module: t@, tied: head@}", {"t@": (5, 6)}),
    "two modules": ("from: t@\n  axes: VD\n  embedding: [t@, u@]", {"t@": (5, 6)}),
    "heads": ("einsum: ...D,DNH->...NH\n  from: w@\n  bias: b@\n  linear: w@", {"w@": (6, 2, 4), "b@": (2, 4)}),
    "out": ("einsum: ...NH,NHD->...D\n  from: w@\n  linear: w@", {"w@": (2, 4, 6)}),
    "stack": ("einsum: ...D,DF->...F\n  from: w@\n  stacked: {i: 0}\n  linear: w@.{i}", {"w@": (3, 6, 7)}),
    "layers": ("einsum: ...D,DF->...F\n  from: w@_{j}\n  linear: w@.{j}", {"w@_0": (6, 7), "w@_1": (6, 7)}),
    "fused rows": ("einsum: ...D,DF->...F\n  from: '{q,k}@'\n  linear: qk@", {"q@": (6, 7), "k@": (6, 7)}),
    "split": ("einsum: ...D,CDNH->...CNH\n  from: w@\n  linear: 'w@.{C:k,v}'", {"w@": (2, 6, 2, 4)}),
    "flat parts": (
        "einsum: '...D,D(N H + K H + K H)->...(N H + K H + K H)'\n  from: w@\n  linear: 'w@.{q,k,v}'",
        {"w@": (6, 16)},
    ),
    "pairs": (
        "einsum: ...D,DNH->...NH\n  from: w@\n  rope: {H: interleaved}\n  linear: {module: w@, rope: half-split}",
        {"w@": (6, 2, 4)},
    ),
    "pairs of a sum": (
        "einsum: '...D,D(N H + K H + K H)->...(N H + K H + K H)'\n  from: w@\n  rope: {H: interleaved, parts: [1, 2]}\n"
        "  linear: {module: w@, rope: half-split}",
        {"w@": (6, 16)},
    ),
    "conv": ("dimension_numbers: NWC,WIO->NWC\n  axes: WIO\n  from: w@\n  conv: w@", {"w@": (3, 2, 4)}),
    "transposed conv": (
        "dimension_numbers: NWC,WIO->NWC\n  axes: WIO\n  from: w@\n  strides: 2\n  padding: VALID\n  conv_transpose: w@",
        {"w@": (3, 2, 4)},
    ),
    "scale": ("from: s@\n  axes: D\n  multiplies_by: scale\n  epsilon: 1e-6\n  rms_norm: s@", {"s@": (6,)}),
    "1+scale": ("from: s@\n  axes: D\n  multiplies_by: 1+scale\n  epsilon: 1e-6\n  rms_norm: s@", {"s@": (6,)}),
    "half": ("einsum: ...D,DF->...F\n  from: w@\n  dtype: bfloat16\n  linear: w@", {"w@": (6, 7)}),
    "wide": ("einsum: ...D,DF->...F\n  from: w@\n  dtype: float32\n  linear: w@", {"w@": (6, 7)}),
    "prescaled by 1/2": (
        "einsum: ...D,DNH->...NH\n  from: w@\n  prescaled_by: 1/sqrt(H)\n  linear: w@",
        {"w@": (6, 2, 4)},
    ),
    "prescaled by 1/sqrt(6)": (
        "einsum: ...D,DF->...F\n  from: w@\n  prescaled_by: 1/sqrt(D)\n  linear: w@",
        {"w@": (6, 7)},
    ),
    "weight norm": (
        "einsum: ...D,DF->...F\n  from: w@\n  weight_norm: g@\n  linear: w@",
        {"w@": (6, 7), "g@": (7,)},
    ),
    "low rank": (
        "einsum: ...D,DE->...E\n  from: w@\n  plus: {einsum: '...D,DR,RE->...E', from: a@, times: c@, scale: 1}\n  linear: w@",
        {"w@": (6, 7), "a@": (6, 2), "c@": (2, 7)},
    ),
    "layer norm": (
        "from: s@/scale\n  bias: s@/bias\n  axes: D\n  multiplies_by: scale\n  epsilon: 1e-6\n  layer_norm: s@",
        {"s@/scale": (6,), "s@/bias": (6,)},
    ),
    "norm without a scale": (
        "bias: s@\n  axes: D\n  multiplies_by: 1\n  epsilon: 1e-6\n  layer_norm: s@",
        {"s@": (6,)},
    ),
    "batch norm": (
        "from: s@/scale\n  bias: s@/bias\n  mean: s@/mean\n  var: s@/var\n  axes: D\n  multiplies_by: scale\n  epsilon: 1e-6\n"
        "  batch_norm: s@",
        {f"s@/{name}": (6,) for name in ("scale", "bias", "mean", "var")},
    ),
    "group norm": (
        "from: s@/scale\n  bias: s@/bias\n  axes: D\n  multiplies_by: scale\n  epsilon: 1e-6\n  num_groups: 3\n  group_norm: s@",
        {"s@/scale": (6,), "s@/bias": (6,)},
    ),
    "1+weight": (
        "from: s@\n  axes: D\n  multiplies_by: scale\n  epsilon: 1e-6\n  rms_norm: {module: s@, multiplies_by: 1+weight}",
        {"s@": (6,)},
    ),
    "parameter": ("from: p@\n  parameter: p@", {"p@": (2, 3, 4)}),
    "scalar": ("from: p@\n  parameter: p@", {"p@": ()}),
    "stacked parameter": ("from: p@\n  stacked: {i: 1}\n  parameter: p@.{i}", {"p@": (2, 3, 4)}),
    "target axes": ("from: p@\n  axes: GD\n  parameter: {name: p@, axes: D G}", {"p@": (3, 6)}),
    "positions": ("from: t@\n  axes: .VD\n  embedding: t@", {"t@": (1, 5, 6)}),
    "conv of images": (
        "dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQIO\n  from: w@/kernel\n  bias: w@/bias\n  conv: w@",
        {"w@/kernel": (3, 2, 2, 4), "w@/bias": (4,)},
    ),
    "depthwise": ("dimension_numbers: NWC,WO->NWC\n  axes: WO\n  from: w@\n  conv: w@", {"w@": (3, 4)}),
    "block diagonal": (
        "einsum: ...BJ,BJZ->...BZ\n  from: w@\n  bias: b@\n  linear: {module: w@, einsum: '...BJ,BJZ->...BZ'}",
        {"w@": (2, 3, 3), "b@": (2, 3)},
    ),
    "words": ("einsum: ...D,DF->...F\n  from: '{p:a,b}@/w'\n  linear: x@.{p}", {"a@/w": (6, 7), "b@/w": (6, 7)}),
    "gru": (
        "gru: g@\n  cell: flax.linen.GRUCell\n  from: g@",
        {f"g@/{x}/kernel": (3 if x[0] == "i" else 5, 5) for x in ("ir", "iz", "in", "hr", "hz", "hn")}
        | {f"g@/{x}/bias": (5,) for x in ("ir", "iz", "in", "hn")},
    ),
    "lstm of haiku": (
        "lstm: g@\n  cell: haiku.LSTM\n  from: g@",
        {"g@/linear/w": (8, 20), "g@/linear/b": (20,)},
    ),
    "gru of keras": (
        "gru: g@\n  cell: keras.layers.GRU\n  from: g@",
        {"g@/vars/0": (3, 15), "g@/vars/1": (5, 15), "g@/vars/2": (2, 15)},
    ),
    "residual": (
        "rnn: g@\n  cell: flax.nnx.SimpleCell(residual=True)\n  from: g@",
        {"g@/dense_i/kernel": (3, 5), "g@/dense_i/bias": (5,), "g@/dense_h/kernel": (5, 5)},
    ),
    "dropped": ("drop: d@\n  because: not a weight", {"d@": (2,)}),
}
REFUSED = {"weight norm", "low rank"}
FACTOR = "prescaled by 1/sqrt(6)"  # refused without the checkpoint that the tensors come from


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))


def case(kinds: list[str], dtypes: list[str], seed: int = 0) -> tuple[convert.RuleFile, MemorySource]:
    rng, rules, arrays = np.random.default_rng(seed), [], {}
    for k, (kind, dtype) in enumerate(zip(kinds, dtypes, strict=True)):
        text, leaves = KINDS[kind]
        rules.append(f"- {text}".replace("@", str(k)))
        for name, shape in leaves.items():
            arrays[name.replace("@", str(k))] = rng.standard_normal(shape).astype(dtype_of(dtype))
    return rule_file("\n".join(rules), HEAD + AXES), MemorySource(arrays)


def forth(rules: convert.RuleFile, source: MemorySource, out: Path, **options: Any) -> Path:
    convert.convert(rules, source, out, overwrite=True, **options)
    return out


def leaves(tree: Any, prefix: str = "") -> dict[str, np.ndarray]:
    if not isinstance(tree, dict):
        return {prefix.removesuffix("/"): tree}
    return {name: x for key, value in tree.items() for name, x in leaves(value, f"{prefix}{key}/").items()}


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class Unread(MemorySource):
    """A checkpoint from which nothing may be read."""

    def read(self, name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read")


def refusal(rules: convert.RuleFile, file: Path, like: MemorySource, **options: Any) -> set[tuple[str, str, str]]:
    """Plan, which must be refused before an array is read; return code, rule and path of each finding."""
    with pytest.raises(convert.PlanError) as error:
        convert.plan_reverse(rules, file, Unread(like.arrays), **options)
    return {(finding.code, finding.rule, finding.path) for finding in error.value.findings}


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_rule_file_comes_back_bit_for_bit_or_is_refused(data: Any, tmp_path: Path) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5))
    dtypes = data.draw(st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=len(kinds), max_size=len(kinds)))  # fmt: skip
    rules, source = case(kinds, dtypes, data.draw(st.integers(0, 9)))
    if set(kinds) == {"dropped"}:
        return
    first = forth(rules, source, tmp_path / "first.safetensors")
    refused = {f"r.yaml:{rule.at.line}" for rule, kind in zip(rules.rules, kinds, strict=True) if kind in REFUSED}
    if refused:
        assert {(code, rule) for code, rule, _ in refusal(rules, first, source)} == {("not-reversible", rule) for rule in refused}  # fmt: skip
        return
    tree = leaves(convert.load_pytree(rules, first, like=source))
    assert tree.keys() == source.arrays.keys()
    second = forth(rules, MemorySource(tree), tmp_path / "second.safetensors")
    one, two = load_file(first), load_file(second)
    assert one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    assert all(same(tree[name], x) for name, x in source.arrays.items())  # also where the first conversion rounded
    if FACTOR in kinds:
        with pytest.raises(convert.PlanError) as error:
            convert.plan_reverse(rules, first)
        assert {(found.code, found.rule) for found in error.value.findings} == {
            ("not-reversible", f"r.yaml:{rule.at.line}")
            for rule, kind in zip(rules.rules, kinds, strict=True)
            if kind == FACTOR
        }
        return
    derived = leaves(
        convert.load_pytree(rules, first)
    )  # without a checkpoint: the same tree, and the same tensors again
    assert derived.keys() == {name for name in tree if not name.startswith("d")}
    third = load_file(forth(rules, MemorySource(derived), tmp_path / "third.safetensors"))
    assert one.keys() == third.keys() and all(same(one[name], third[name]) for name in one)
    rounded = {made.leaf for made in convert.plan_reverse(rules, first, source).leaves if made.rounded}
    for name, x in derived.items():
        assert x.shape == tree[name].shape and (
            name in rounded or x.dtype != tree[name].dtype or same(x, tree[name])
        ), name


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_alone(kind: str, tmp_path: Path) -> None:
    rules, source = case([kind, "table"], ["float32", "float32"])
    file = forth(rules, source, tmp_path / "out.safetensors")
    if kind in REFUSED:
        assert {code for code, _, _ in refusal(rules, file, source)} == {"not-reversible"}
        with pytest.raises(convert.PlanError) as error:
            convert.plan_reverse(rules, file)
        assert {(finding.code, finding.rule) for finding in error.value.findings} == {("not-reversible", "r.yaml:9")}
        return
    plan = convert.plan_reverse(rules, file, Unread(source.arrays))
    assert [kept.leaf for kept in plan.kept] == (["d0"] if kind == "dropped" else [])
    assert not any(made.rest for made in plan.leaves)
    tree = leaves(convert.load_pytree(rules, file, like=source))
    assert all(same(tree[name], x) for name, x in source.arrays.items())


def test_a_box_of_a_leaf_is_that_part_of_it(tmp_path: Path) -> None:
    for kind in ("split", "flat parts", "pairs", "stack", "heads"):
        rules, source = case([kind], ["float32"])
        plan = convert.plan_reverse(rules, forth(rules, source, tmp_path / "out.safetensors"), source)
        reversed_ = ReversedSource(plan)
        x = source.arrays["w0"]
        for axis, size in enumerate(x.shape):
            for start in range(size):
                origin = tuple(start if k == axis else 0 for k in range(x.ndim))
                box = Box(origin, tuple(n - o for n, o in zip(x.shape, origin, strict=True)))
                assert same(reversed_.read_box("w0", box), x[box.within((0,) * x.ndim)])


def test_rows_that_the_rules_cut_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    said = {"vocab_size": 4}
    head = HEAD + "facts: {vocab_size: 4}\n"
    rules = rule_file("- from: t\n  axes: VD\n  rows: $vocab_size\n  embedding: t", head)
    source = MemorySource({"t": np.arange(30, dtype=np.float32).reshape(5, 6)})
    file = tmp_path / "out.safetensors"
    save_file({"t.weight": -source.arrays["t"][:4]}, file)
    plan = convert.plan_reverse(rules, file, source, settings=said)
    assert plan.leaves[0].rest == 6 and "6 elements of t are in no tensor" in plan.notes[0]
    tree = convert.load_pytree(rules, file, like=source, settings=said)
    assert np.array_equal(tree["t"], np.concatenate([-source.arrays["t"][:4], source.arrays["t"][4:]]))


def changed(file: Path, **tensors: np.ndarray | None) -> Path:
    """The file with other tensors; None removes one."""
    held = {**load_file(file), **{name.replace("__", "."): x for name, x in tensors.items()}}
    save_file({name: np.ascontiguousarray(x) for name, x in held.items() if x is not None}, file)
    return file


def test_a_file_that_is_not_that_of_the_rules_is_refused(tmp_path: Path) -> None:
    rules, source = case(["heads", "table"], ["float32", "float32"])
    file = forth(rules, source, tmp_path / "out.safetensors")
    whole = file.read_bytes()

    def problem(**tensors: np.ndarray | None) -> set[tuple[str, str, str]]:
        file.write_bytes(whole)
        return refusal(rules, changed(file, **tensors), source)

    assert problem(w0__bias=None) == {("tensor-missing", "r.yaml:9", "w0.bias")}
    assert problem(extra=np.ones(2, np.float32)) == {("tensor-unexpected", "", "extra")}
    assert problem(t1__weight=np.ones((6, 5), np.float32)) == {("tensor-spec-differs", "r.yaml:13", "t1.weight")}
    assert problem(t1__weight=np.ones((5, 6), np.float16)) == {("tensor-spec-differs", "r.yaml:13", "t1.weight")}


def test_the_copy_of_a_tied_table_is_left_out_and_another_head_is_not(tmp_path: Path) -> None:
    """Files of fine-tuned models have the head beside the table, of the same values."""
    rules, source = case(["heads", "table"], ["float32", "float32"])
    file = forth(rules, source, tmp_path / "out.safetensors")
    table = load_file(file)["t1.weight"]
    plan = convert.plan_reverse(rules, changed(file, lm_head__weight=table), source)
    assert plan.left_out == {"lm_head.weight": "a copy of t1.weight, to which the model ties its head"}
    table[-1, -1] += 1
    assert refusal(rules, changed(file, lm_head__weight=table), source) == {("tensor-unexpected", "", "lm_head.weight")}


def test_copies_of_one_leaf_must_be_equal(tmp_path: Path) -> None:
    for kind in ("tied", "two modules"):
        rules, source = case([kind], ["float32"])
        file = forth(rules, source, tmp_path / "out.safetensors")
        other = next(name for name in load_file(file) if name != "t0.weight")
        wrong = load_file(file)[other].copy()
        wrong[2, 3] += 1
        with pytest.raises(convert.PlanError) as error:
            convert.load_pytree(rules, changed(file, **{other: wrong}), like=source)
        assert error.value.code == "tied-weights-differ"
        assert error.value.findings[0].path == f"t0.weight and {other}"


@pytest.mark.parametrize("kind", ["1+scale", "prescaled by 1/2"])
def test_a_value_that_no_leaf_gives_is_an_error(kind: str, tmp_path: Path) -> None:
    rules, source = case([kind], ["float32"])
    file = forth(rules, source, tmp_path / "out.safetensors")
    (name,) = load_file(file)
    wrong = load_file(file)[name].copy()
    wrong.flat[1] = 1e-30 if kind == "1+scale" else 1e-45
    with pytest.raises(convert.PlanError) as error:
        convert.load_pytree(rules, changed(file, **{name: wrong}), like=source)
    finding = error.value.findings[0]
    assert (finding.code, finding.path, finding.data["values"]) == ("value-not-reversible", name, 1)


def test_a_rounding_is_not_made_in_silence(tmp_path: Path) -> None:
    """Tensors in float32, leaves in bfloat16: with --dtype float32, values that bfloat16 holds come back; others are refused."""
    rules, source = case(["heads"], ["bfloat16"])
    file = forth(rules, source, tmp_path / "out.safetensors", dtype="float32")
    assert {code for code, _, _ in refusal(rules, file, source)} == {"tensor-spec-differs"}
    tree = leaves(convert.load_pytree(rules, file, like=source, dtype="float32"))
    assert all(same(tree[name], x) for name, x in source.arrays.items())
    bias = load_file(file)["w0.bias"].copy()
    bias[0] = 1.0001
    with pytest.raises(convert.PlanError) as error:
        convert.load_pytree(rules, changed(file, w0__bias=bias), like=source, dtype="float32")
    assert error.value.code == "value-not-reversible"


def test_an_index_that_names_no_file_is_an_error(tmp_path: Path) -> None:
    rules, source = case(["heads", "table"], ["float32", "float32"])
    convert.convert(rules, source, tmp_path / "out", max_shard_bytes=200)
    next((tmp_path / "out").glob("model-00001-*")).unlink()
    with pytest.raises(convert.CheckpointError) as error:
        convert.plan_reverse(rules, tmp_path / "out", source)
    assert error.value.code == "output-incomplete"


def test_the_target_is_the_one_whose_names_the_file_has(tmp_path: Path) -> None:
    head = "model: m\ntitle: M\ntargets: {one: {loads: T}, two: {loads: U}}\n"
    rules = rule_file("- from: t\n  axes: VD\n  embedding: {one: a, two: b}", head)
    source = MemorySource({"t": np.ones((2, 3), np.float32)})
    file = forth(rules, source, tmp_path / "out.safetensors", to="two")
    assert convert.plan_reverse(rules, file, source).forward.target == "two"


def test_parts_whose_operations_need_all_elements_fill_only_their_own(tmp_path: Path) -> None:
    """The elements are reordered before they are cut, by an operation that is no view: each part is undone at once, and masked."""
    rules, source = case(["table"], ["float32"])
    plan = convert.plan_reverse(rules, forth(rules, source, tmp_path / "out.safetensors"), source)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    made = MadeLeaf("x", TensorSpec(x.shape, "float32"), ())
    out = np.full(x.shape, np.nan, np.float32)
    for rows in ((0, 3), (3, 8)):
        ops = (Interleave(0, None, (8, 0, 4)), Slice(0, *rows))
        part = replace(plan.leaves[0].parts[0][1], ops=ops)
        share = Share(made, plan.leaves[0].parts[0][0], part, apply(ops, x))
        share.fill(out, Box((0, 0), x.shape))
        share.compare(out, Box((0, 0), x.shape))
    assert np.array_equal(out, x)


def test_a_value_that_changed_is_computed_back_and_the_others_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    rules, source = case(["1+scale"], ["float32"])
    file = forth(rules, source, tmp_path / "out.safetensors")
    weight = load_file(file)["s0.weight"].copy()
    weight[2] = 1.5
    got = convert.load_pytree(rules, changed(file, s0__weight=weight), like=source)["s0"]
    assert got[2] == 0.5 and same(np.delete(got, 2), np.delete(source.arrays["s0"], 2))


def test_a_factor_that_rounds_needs_the_checkpoint_or_wider_leaves(tmp_path: Path) -> None:
    rules, source = case([FACTOR], ["bfloat16"])
    file = forth(rules, source, tmp_path / "out.safetensors")
    with pytest.raises(convert.PlanError) as error:
        convert.plan_reverse(rules, file)
    assert error.value.code == "not-reversible" and "wider leaves with --dtype" in error.value.findings[0].fix
    wide = convert.load_pytree(rules, file, dtype="float32")
    assert wide["w0"].dtype == np.float32
    again = forth(rules, MemorySource(wide), tmp_path / "again.safetensors", dtype="bfloat16")
    assert same(load_file(again)["w0.weight"], load_file(file)["w0.weight"])
    with pytest.raises(convert.PlanError) as error:
        convert.plan_reverse(rules, again, dtype="float16")
    assert error.value.code == "dtype-unknown"


def test_a_changed_value_that_no_factor_gives_is_an_error(tmp_path: Path) -> None:
    rules, source = case([FACTOR], ["float32"])
    file = forth(rules, source, tmp_path / "out.safetensors")
    other = np.random.default_rng(3).standard_normal((7, 6)).astype(np.float32)
    with pytest.raises(convert.PlanError) as error:
        convert.load_pytree(rules, changed(file, w0__weight=other), like=source)
    assert error.value.code == "value-not-reversible"
