"""The convolution law: for any dimension numbers, torch's convolution with the derived kernel is JAX's with the stored one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import PlanError, RuleError
from convert.layers import Convolution
from convert.layers.conv.dimension_numbers import parse_dimension_numbers
from convert.planning.planner import make_plan
from convert.rules.schema import rule_record
from support.memory_source import MemorySource, rule_file, run

PLAIN = (
    "- dimension_numbers: {numbers}\n  axes: {axes}\n  from: k\n  bias: b\n  feature_group_count: {groups}\n  conv: m\n"
)
TORCH = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    spatial = "XYZ"[: draw(st.integers(1, 3))]
    depthwise = draw(st.booleans())
    mix = lambda letters: "".join(draw(st.permutations(letters)))  # noqa: E731
    groups = draw(st.integers(2, 3)) if depthwise else draw(st.integers(1, 3))
    return {
        "spatial": spatial,
        "input": mix("NC" + spatial),
        "kernel": mix(("O" if depthwise else "OI") + spatial),
        "result": mix("NC" + spatial),
        "own": draw(st.none() | st.permutations(("O" if depthwise else "OI") + spatial).map("".join)),
        "depthwise": depthwise,
        "groups": groups,
        "multiplier": 1 if depthwise else draw(st.integers(1, 2)),
        "inner": 1 if depthwise else draw(st.sampled_from([1, 5])),
        "stacked": draw(st.booleans()),
        "long_bias": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def law(c: dict[str, Any]) -> None:
    rng = np.random.default_rng(c["seed"])
    sizes = {"N": 2, "O": c["groups"] * c["multiplier"], "I": c["inner"], **dict(zip("XYZ", (2, 3, 4), strict=True))}
    letters = dict(zip("OIXYZ", "ABKLM", strict=True))
    kernel = rng.standard_normal([sizes[a] for a in c["kernel"]])
    channels = c["result"].replace("N", "")
    bias = rng.standard_normal(sizes["O"])
    stored = bias.reshape([sizes["O"] if a == "C" else 1 for a in channels]) if c["long_bias"] else bias
    x = rng.standard_normal(
        [c["groups"] * sizes["I"] if a == "C" else sizes["N"] if a == "N" else sizes[a] + 2 for a in c["input"]]
    )
    numbers = f"{c['input']},{c['kernel']}->{c['result']}"
    target = "m.{i}" if c["stacked"] else "m"
    if c["own"]:
        target = f'{{module: "{target}", dimension_numbers: "{c["input"]},{c["own"]}->{c["input"]}"}}'
    rule = (
        f'- dimension_numbers: "{numbers}"\n  axes: {"".join(letters[a] for a in c["kernel"])}\n  from: k\n  bias: b\n'
    )
    rule += "" if c["depthwise"] else f"  feature_group_count: {c['groups']}\n"
    rule += "  stacked: {i: 0}\n" if c["stacked"] else ""
    rule += f"  conv: {target}\n"
    tree = {"k": kernel, "b": stored}
    if c["stacked"]:
        tree = {name: np.stack([np.zeros_like(value), value]) for name, value in tree.items()}
    out = run(make_plan(rule_file(rule), MemorySource(tree)))
    module = "m.1" if c["stacked"] else "m"
    weight, added = out[f"{module}.weight"], out[f"{module}.bias"]
    if c["own"]:  # the order that the target says, read with NumPy's labels
        weight = weight[..., None] if c["depthwise"] else weight
        weight = np.einsum(
            f"{c['own'] + 'I' * c['depthwise']}->OI{''.join(a for a in c['input'] if a not in 'NC')}", weight
        )

    with jax.enable_x64(True):
        want = jax.lax.conv_general_dilated(
            x,
            kernel[..., None] if c["depthwise"] else kernel,
            [1] * len(c["spatial"]),
            "VALID",
            dimension_numbers=(c["input"], c["kernel"] + "I" * c["depthwise"], c["result"]),
            feature_group_count=c["groups"],
            precision="highest",
        )
    order = "NC" + "".join(a for a in c["input"] if a not in "NC")
    moved = torch.tensor(np.einsum(f"{c['input']}->{order}", x))
    got = TORCH[len(c["spatial"]) - 1](moved, torch.tensor(weight), torch.tensor(added), groups=c["groups"]).numpy()
    wanted = np.einsum(f"{c['result']}->{order}", np.asarray(want)) + bias.reshape(-1, *[1] * len(c["spatial"]))
    assert np.abs(got - wanted).max() <= 1e-12 * np.abs(wanted).max()


@pytest.mark.slow
@given(convolutions())
@settings(max_examples=40, deadline=None)
def test_derived_kernel_is_the_convolution(case: dict[str, Any]) -> None:
    law(case)


def as_stored(self: Convolution, role: str, letters: str, variant: Any, layer: Any) -> tuple[str, ...]:
    return (self.letter("O"),) if role == "bias" else tuple(letters)


def inputs_first(self: Convolution, role: str, letters: str, variant: Any, layer: Any) -> tuple[str, ...]:
    if role == "bias":
        return (self.letter("O"),)
    return (self.letter("I"), self.letter("O"), *map(self.letter, self.numbers.spatial))


def kernels_spatial_order(self: Convolution, role: str, letters: str, variant: Any, layer: Any) -> tuple[str, ...]:
    if role == "bias":
        return (self.letter("O"),)
    return (self.letter("O"), self.letter("I"), *(self.letter(a) for a in self.numbers.kernel if a not in "OI"))


@pytest.mark.parametrize("fault", [as_stored, inputs_first, kernels_spatial_order])
def test_the_law_catches_a_wrong_derivation(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {
        "spatial": "XY",
        "input": "NXYC",
        "kernel": "YXIO",
        "result": "NXYC",
        "own": None,
        "depthwise": False,
        "groups": 1,
        "multiplier": 2,
        "inner": 5,
        "stacked": False,
        "long_bias": False,
        "seed": 0,
    }
    law(case)
    monkeypatch.setattr(Convolution, "groups", fault)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        law(case)


def test_flax_conv_and_depthwise() -> None:
    rules = rule_file(
        "- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQCD\n  from: patch/kernel\n  conv: patch\n"
        "- dimension_numbers: NWC,WO->NWC\n  axes: KE\n  from: time/w\n  conv: time\n"
    )
    tree = {"patch/kernel": np.zeros((14, 15, 3, 32), np.float32), "time/w": np.zeros((4, 32), np.float32)}
    shapes = {step.name: step.spec.shape for step in make_plan(rules, MemorySource(tree)).steps}
    assert shapes == {"patch.weight": (32, 3, 14, 15), "time.weight": (32, 1, 4)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NHWC", "'NHWC' is not the dimension numbers of a convolution, such as NHWC,HWIO->NHWC"),
        ("NHC,HWIO->NHC", "input, kernel and result of 'NHC,HWIO->NHC' have different spatial axes"),
        ("NWW,WIO->NWC", "'NWW' in 'NWW,WIO->NWC' has a letter twice"),
        ("NW,WIO->NW", "'NW' in 'NW,WIO->NW' needs N (the batch) and C (the channels)"),
        ("NWC,WI->NWC", "the kernel 'WI' in 'NWC,WI->NWC' needs O, its output channels"),
        ("NC,IO->NC", "'NC,IO->NC' has 0 spatial axes; torch convolves along one to 3"),
        ("NUVWXC,UVWXIO->NUVWXC", "'NUVWXC,UVWXIO->NUVWXC' has 4 spatial axes; torch convolves along one to 3"),
    ],
)
def test_what_are_no_dimension_numbers(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_dimension_numbers(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            "- dimension_numbers: NWC,WIO->NWC\n  axes: KE\n  from: w\n  conv: m",
            "r.yaml:5:3: the kernel W I O of NWC,WIO->NWC has 3 axes, and `axes` gives 2 letters (K E)",
        ),
        (
            "- dimension_numbers: NWC,WO->NWC\n  axes: KE\n  feature_group_count: E\n  from: w\n  conv: m",
            "r.yaml:5:3: the kernel of NWC,WO->NWC has no I, so every channel is its own group; leave "
            "feature_group_count out",
        ),
        (
            "- dimension_numbers: NWC,WIO->NWC\n  axes: KIE\n  feature_group_count: 2\n  from: '{a,b}/w'\n  conv: m",
            "r.yaml:5:3: the leaf of a convolution is not split; several leaves may be its output channels, one after the "
            "other, where it has no groups and the target no `axes` or `dimension_numbers`",
        ),
        (
            "- dimension_numbers: NWC,WIO->NWC\n  axes: KIE\n  from: w\n"
            "  conv: {module: m, dimension_numbers: 'NHWC,HWIO->NHWC'}",
            "r.yaml:5:3: NHWC,HWIO->NHWC of the target and NWC,WIO->NWC of the source differ in more than the order of axes",
        ),
        (
            "- dimension_numbers: NWC,WIO->NWC\n  axes: KIE\n  feature_group_count: 0\n  from: w\n  conv: m",
            "r.yaml:7:24: a convolution has one group or more, not 0",
        ),
        (
            "- dimension_numbers: NWC,WIO->NWC\n  axes: KIE\n  groups: 2\n  from: w\n  conv: m",
            f"r.yaml:7:3: unknown key 'groups' in a `conv` rule: expected one of {', '.join(rule_record('conv').keys)}; "
            "write feature_group_count, jax.lax's word for torch's and Keras' groups",
        ),
        (
            "- dimension_numbers: NWC,WIO->NWC\n  axes: KIE\n  stride: 2\n  padding: SAME\n  from: w\n  conv_transpose: m",
            "r.yaml:7:3: unknown key 'stride' in a `conv_transpose` rule: "
            f"expected one of {', '.join(rule_record('conv_transpose').keys)}; write strides",
        ),
    ],
)
def test_errors_of_a_rule(rule: str, message: str) -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(rule)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("conv: m", "k: float32[4,3,8] as K I E: E = 8 output channels do not make 3 groups (`feature_group_count`) of one size; correct the number, or the axes"),
        ("conv_transpose: m", "k: float32[4,3,8] as K I E: E = 8 output channels do not make 3 groups (`feature_group_count`) of one size; correct the number, or the axes"),
        ("feature_group_count: I\n  conv: m", "k: float32[4,3,8] as K I E: E = 8 output channels do not make I = 3 groups (`feature_group_count`) of one size; correct the number, or the axes"),
        ("feature_group_count: G\n  conv: m", "k: float32[4,3,8] as K I E: `feature_group_count` is G, and no leaf gives G a size; write the number"),
    ],
)  # fmt: skip
def test_groups_that_do_not_divide_the_channels(rule: str, said: str) -> None:
    """No library convolves with such a kernel; torch refuses it as late as in the user's hands."""
    groups = "" if "feature_group_count" in rule else "feature_group_count: 3\n  "
    rules = rule_file(f"- dimension_numbers: NWC,WIO->NWC\n  axes: KIE\n  from: k\n  {groups}{rule}")
    with pytest.raises(PlanError) as refused:
        make_plan(rules, MemorySource({"k": np.zeros((4, 3, 8), np.float32)}))
    assert [str(finding) for finding in refused.value.findings] == [f"r.yaml:5: {said}"]
    with pytest.raises(Exception, match="feature_group_count|must be divisible|multiple"):
        jax.lax.conv_general_dilated(np.zeros((1, 9, 9)), np.zeros((4, 3, 8)), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=3)  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"k": (4, 8), "b": (8,)}, "k: float32[4,8] does not fit: the rule gives it the axes K I E"),
        (
            {"k": (4, 3, 8), "b": (2, 8)},
            "b: float32[2,8] does not fit: a bias has one value for each of the output channels E",
        ),
    ],
)
def test_leaves_that_do_not_fit(shapes: dict[str, tuple[int, ...]], message: str) -> None:
    rules = rule_file(PLAIN.format(numbers="NWC,WIO->NWC", axes="KIE", groups=1))
    tree = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(PlanError) as refused:
        make_plan(rules, MemorySource(tree))
    assert message in str(refused.value)
