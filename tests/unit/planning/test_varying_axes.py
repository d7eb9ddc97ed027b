"""Letters whose size differs from layer to layer, and strides that are a size."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import PlanError, RuleError
from convert.core.errors import OptionError
from convert.planning.options import ConversionOptions
from convert.planning.planner import make_plan
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.memory_source import HEAD, MemorySource, rule_file, run
from support.weights_level import check_weights

AXES = "axes:\n  I: {is: channels in, varies: true}\n  O: {is: channels out, varies: true}\n"
RULES = """
- dimension_numbers: NHWC,HWIO->NHWC
  axes: PQIO
  from: block_{i}/conv/kernel
  bias: block_{i}/conv/bias
  conv: blocks.{i}.conv
- from: block_{i}/norm/scale
  bias: block_{i}/norm/bias
  mean: block_{i}/norm/mean
  var: block_{i}/norm/var
  multiplies_by: scale
  epsilon: 1e-5
  axes: O
  batch_norm: blocks.{i}.norm
- einsum: ...I,IO->...O
  from: block_{i}/head
  linear: blocks.{i}.head
"""
PRIMES = st.sampled_from([1, 2, 3, 5, 7])


def tree(widths: list[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made = {}
    for i, (inner, outer) in enumerate(itertools.pairwise(widths)):
        shapes = {"conv/kernel": (3, 3, inner, outer), "conv/bias": (outer,), "head": (inner, outer)}
        shapes |= {f"norm/{leaf}": (outer,) for leaf in ("scale", "bias", "mean", "var")}
        made |= {f"block_{i}/{leaf}": rng.standard_normal(shape).astype(np.float32) for leaf, shape in shapes.items()}
    return made


@settings(max_examples=15, deadline=None)
@given(st.lists(PRIMES, min_size=3, max_size=5))
def test_each_layer_has_its_own_sizes(widths: list[int]) -> None:
    leaves = tree(widths)
    plan = make_plan(rule_file(RULES, HEAD + AXES), MemorySource(leaves))
    made = run(plan)
    for i in range(len(widths) - 1):
        np.testing.assert_array_equal(made[f"blocks.{i}.conv.weight"], np.einsum("pqio->oipq", leaves[f"block_{i}/conv/kernel"]))  # fmt: skip
        np.testing.assert_array_equal(made[f"blocks.{i}.head.weight"], leaves[f"block_{i}/head"].T)
        np.testing.assert_array_equal(made[f"blocks.{i}.norm.running_var"], leaves[f"block_{i}/norm/var"])
    assert "I" not in plan.sizes
    assert plan.sizes["P"] == plan.sizes["Q"] == 3


def test_without_the_key_a_letter_is_one_size() -> None:
    with pytest.raises(PlanError) as error:
        make_plan(rule_file(RULES), MemorySource(tree([2, 3, 5])))
    assert {finding.code for finding in error.value.findings} == {"size-conflict"}


def test_the_leaves_of_one_layer_agree() -> None:
    leaves = tree([2, 3, 5])
    leaves["block_1/norm/mean"] = np.zeros(3, np.float32)
    with pytest.raises(PlanError) as error:
        make_plan(rule_file(RULES, HEAD + AXES), MemorySource(leaves))
    finding = error.value.findings[0]
    assert (finding.code, finding.path, finding.problem) == ("shape-mismatch", "block_1/norm/mean", "O differs within one layer")  # fmt: skip
    assert (finding.expected, finding.got) == ("O = 5, as in block_1/norm/scale: float32[5]", "O = 3: float32[3] as O")


def test_the_file_is_what_the_plan_says(tmp_path: Path) -> None:
    plan = make_plan(rule_file(RULES, HEAD + AXES), MemorySource(tree([2, 3, 5, 7])))
    list(execute(plan, tmp_path / "out.safetensors"))
    assert check_weights(plan, open_written(tmp_path / "out.safetensors")).findings == ()


def test_groups_of_channels_may_be_an_axis_that_varies() -> None:
    rules = (
        "- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQAO\n  from: '{a,b}'\n  feature_group_count: O\n  conv: '{a,b}'"
    )
    leaves = {"a": np.ones((3, 3, 1, 5), np.float32), "b": np.ones((3, 3, 1, 7), np.float32)}
    assert {
        name: x.shape for name, x in run(make_plan(rule_file(rules, HEAD + AXES), MemorySource(leaves))).items()
    } == {
        "a.weight": (5, 1, 3, 3),
        "b.weight": (7, 1, 3, 3),
    }


BY_LAYER = """
- {from: "q_{i}", axes: DH, parameter: "q.{i}"}
- {from: "k_{j}", axes: H, parameter: "k.{j}"}
- {from: s, axes: "", parameter: s}
"""


@pytest.mark.parametrize(
    ("varies", "changed", "problem"),
    [
        ("[i, j]", {}, ""),
        ("true", {"k_1": (9,)}, ""),  # the leaves of one rule agree in a layer, and so they do
        ("i", {"k_1": (9,)}, ""),  # {j} numbers other layers
        ("[i, j]", {"k_1": (9,)}, "float32[9] as H makes H[1] = 9 (head), but q_1 (r.yaml:6, float32[2,6] as D H) makes it 6"),
        ("[i, j]", {"s": (2,)}, "float32[2] does not fit: the rule says that it is one number"),
    ],
)  # fmt: skip
def test_all_rules_agree_in_a_layer(varies: str, changed: dict[str, tuple[int, ...]], problem: str) -> None:
    shapes = {"q_0": (2, 4), "k_0": (4,), "q_1": (2, 6), "k_1": (6,), "s": ()} | changed
    source = MemorySource({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    rules = rule_file(BY_LAYER, f"{HEAD}axes: {{H: {{is: head, varies: {varies}}}}}\n")
    if not problem:
        assert make_plan(rules, source).steps
        return
    with pytest.raises(PlanError) as refused:
        make_plan(rules, source)
    (finding,) = refused.value.findings
    assert problem in finding.problem and finding.path == next(iter(changed))


def test_the_index_of_layers_is_one_of_the_rules() -> None:
    with pytest.raises(RuleError, match="`varies` of H refers to 'k', which is not declared in `indices`"):
        rule_file(BY_LAYER, HEAD + "axes: {H: {is: head, varies: [i, k]}}\n")


@pytest.mark.parametrize(
    ("rule", "user"),
    [
        ("- einsum: ...D,DO->...O\n  from: w\n  prescaled_by: 1/sqrt(O)\n  linear: m", "`prescaled_by`"),
        ("- einsum: ...D,DO->...O\n  from: w\n  rope: {O: interleaved}\n  linear: m", "`rope`"),
        ("- einsum: ...I,IF->...F\n  from: w\n  flattened: {I: HWC}\n  linear: m", "`flattened`"),
        ("- einsum: ...I,IR,RO->...O\n  from: w\n  times: v\n  linear: m", "a low-rank product"),
        ('- einsum: "...D,D(C O)->...(C O)"\n  from: w\n  linear: "{a,b}"', "a composite axis"),
        ('- einsum: "...D,DOF->...OF"\n  from: w\n  linear: "m.{O}"', "the target's path"),
        ("- dimension_numbers: NWC,WIO->NWC\n  axes: OPQ\n  from: w\n  padding: VALID\n  strides: $O\n  conv: m", "`strides`"),
        ("- einsum: ...D,DO->...O\n  from: w\n  weight_norm: g\n  linear: m", "`weight_norm`"),
    ],
)  # fmt: skip
def test_what_needs_one_size_is_refused(rule: str, user: str) -> None:
    with pytest.raises(RuleError) as error:
        rule_file(rule, HEAD + AXES)
    finding = next(f for f in error.value.findings if f.code == "rule-layer-conflict")
    assert f"varies from layer to layer, and {user} needs one size" in finding.problem


# ---- strides


PATCHES = (
    "- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQIO\n  from: w\n  padding: VALID\n  strides: STRIDES\n  conv: m"
)


@pytest.mark.parametrize(
    ("strides", "header", "wanted"),
    [("$P", "", [3, 3]), ("[$P, $Q]", "", [3, 5]), ("[2, $Q]", "", [2, 5]), ("$step", "facts: {step: 4}\n", [4, 4])],
)
def test_strides_that_are_a_size_or_a_fact(strides: str, header: str, wanted: list[int]) -> None:
    rules = rule_file(PATCHES.replace("STRIDES", strides), HEAD + header)
    plan = make_plan(rules, MemorySource({"w": np.ones((3, 5, 2, 7), np.float32)}))
    assert plan.layers[0]["strides"] == wanted
    rule = plan.steps[0].parts[0].rule
    assert rule is not None
    assert rule.kind.geometry.strides == tuple(wanted)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("strides", "header", "code"),
    [
        ("$Z", "", "rule-unknown-name"),
        ("P", "", "rule-wrong-value"),
        ("[$P, $P, $P]", "", "rule-layer-conflict"),
        ("$step", "facts: {step: ask}\n", "size-unknown"),
        ("$step", "facts: {step: 0}\n", "size-unknown"),
    ],
)
def test_strides_that_are_refused(strides: str, header: str, code: str) -> None:
    with pytest.raises((PlanError, RuleError)) as error:
        rules = rule_file(PATCHES.replace("STRIDES", strides), HEAD + header)
        make_plan(rules, MemorySource({"w": np.ones((3, 5, 2, 7), np.float32)}))
    assert error.value.findings[0].code == code, error.value


def test_config_names_the_sizes_of_the_first_and_the_last_layer() -> None:
    head = f"{HEAD + AXES}  i: {{is: layers}}\nfacts: {{kinds: {{repeat: [a, a, b], length: $i}}}}\n".replace(
        "{torch: {loads: T}}", "{torch: {loads: T, config: {first: '$O[0]', last: '$O[-1]', kinds: $kinds}}}"
    )
    plan = make_plan(rule_file(RULES, head), MemorySource(tree([2, 3, 5, 7])))
    assert plan.config == {"first": 3, "last": 7, "kinds": ["a", "a", "b"], "dtype": "float32"}
    with pytest.raises(RuleError, match=r"'P\[0\]'"):
        rule_file(RULES, head.replace("O[0]", "P[0]"))


def test_a_list_that_repeats_may_be_set_to_another_one_of_its_words() -> None:
    head = HEAD.replace("{torch: {loads: T}}", "{torch: {loads: T, config: {kinds: $kinds}}}")
    rules = rule_file(RULES, f"{head + AXES}  i: {{is: layers}}\nfacts: {{kinds: {{repeat: [a, a, b], length: $i}}}}\n")
    source = MemorySource(tree([2, 3, 5]))
    assert make_plan(rules, source, ConversionOptions(settings={"kinds": ["b", "a"]})).config == {"kinds": ["b", "a"], "dtype": "float32"}  # fmt: skip
    for wrong in (["b", "c", "a"], "a", [1, 2, 3]):
        with pytest.raises(OptionError, match="a list of i values, each a or b"):
            make_plan(rules, source, ConversionOptions(settings={"kinds": wrong}))
    with pytest.raises(
        PlanError, match=r"expected kinds to be a list of i = 2 \(layers\) values, each a or b, got \['b'\]"
    ):
        make_plan(rules, source, ConversionOptions(settings={"kinds": ["b"]}))
