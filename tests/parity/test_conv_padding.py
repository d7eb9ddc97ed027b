"""Padding and strides: what the plan says torch needs is what JAX computes, for any size of the input."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import PlanError, RuleError
from convert.layers.conv.padding import Geometry, crops, pads, torch_padding, torch_transposed, torch_transposed_padding
from convert.planning.planner import make_plan
from support.memory_source import MemorySource, rule_file

pairs = st.tuples(st.integers(0, 3), st.integers(0, 3))


@st.composite
def geometries(draw: st.DrawFn, named: tuple[str, ...]) -> tuple[Geometry, tuple[int, ...], tuple[int, ...]]:
    """A geometry, the kernel's sizes and those of the input."""
    many = draw(st.integers(1, 3)) if "CAUSAL" not in named else 1
    each = lambda least, most: tuple(draw(st.integers(least, most)) for _ in range(many))  # noqa: E731
    kernel, strides, dilation = each(1, 4), each(1, 3), each(1, 2)
    padding = draw(st.sampled_from(named) | st.tuples(*[pairs] * many))
    size = tuple(d * (k - 1) + 1 + more for k, d, more in zip(kernel, dilation, each(0, 5), strict=True))
    return Geometry(padding, strides, dilation), kernel, size


def convolved(geometry: Geometry, kernel: np.ndarray, x: np.ndarray) -> np.ndarray:
    """By JAX, with its own word for the padding."""
    many = x.ndim - 2
    spatial = "HWD"[:many]
    with jax.enable_x64(True):
        return np.asarray(
            jax.lax.conv_general_dilated(
                x, kernel, geometry.strides, geometry.padding, rhs_dilation=geometry.dilation,
                dimension_numbers=("NC" + spatial, "OI" + spatial, "NC" + spatial),
            )
        )  # fmt: skip


@pytest.mark.slow
@given(geometries(("SAME", "SAME_LOWER", "VALID")), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_zeros_of_a_convolution_are_those_of_jax(case: Any, seed: int) -> None:
    """And what is said of them holds: for one residue of the size, for all, or as torch's own `padding`."""
    geometry, kernel, size = case
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((1, 2, *size)), rng.standard_normal((3, 2, *kernel))
    want = convolved(geometry, w, x)
    many = len(kernel)
    call = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[many - 1]
    options = {"stride": geometry.strides, "dilation": geometry.dilation}

    def run(padded: torch.Tensor, **more: Any) -> np.ndarray:
        with warnings.catch_warnings():  # torch says once that padding="same" may copy
            warnings.simplefilter("ignore", UserWarning)
            return call(padded, torch.tensor(w), **options, **more).numpy()

    sides = [n for pair in reversed(pads(geometry, kernel, size)) for n in pair]
    tolerance = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(run(torch.nn.functional.pad(torch.tensor(x), sides)), want, **tolerance)
    said = torch_padding(Geometry(geometry.padding, geometry.strides, geometry.dilation, size), kernel, "HWD"[:many])
    for allowed in said.allowed:
        if "F.pad" in said.text and allowed != "same":
            if any(allowed):  # the code cuts the end off
                cut = (..., *(slice(size) for size in want.shape[2:]))
                np.testing.assert_allclose(run(torch.tensor(x), padding=tuple(allowed))[cut], want, **tolerance)
            continue
        padding = allowed if isinstance(allowed, str) else tuple(allowed)
        np.testing.assert_allclose(run(torch.tensor(x), padding=padding), want, **tolerance)
    if "F.pad" in said.text:  # the numbers are those that are written
        numbers = [int(n) for n in said.text.split("F.pad(x, (")[1].split(")")[0].strip(",").split(",")]
        np.testing.assert_allclose(run(torch.nn.functional.pad(torch.tensor(x), numbers)), want, **tolerance)
    whatever = torch_padding(geometry, kernel, "HWD"[:many])
    if whatever.text.startswith("padding=("):  # said without knowing the size
        np.testing.assert_allclose(run(torch.tensor(x), padding=tuple(whatever.allowed[0])), want, **tolerance)


@pytest.mark.slow
@given(geometries(("SAME", "VALID")), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_arguments_of_a_transposed_convolution_give_jaxs(case: Any, seed: int) -> None:
    geometry, kernel, size = case
    size = tuple(min(n, 4) for n in size)
    rng = np.random.default_rng(seed)
    x, w, b = rng.standard_normal((1, 2, *size)), rng.standard_normal((2, 3, *kernel)), rng.standard_normal(3)
    many = len(kernel)
    spatial = "HWD"[:many]
    with jax.enable_x64(True):
        try:
            want = np.asarray(
                jax.lax.conv_transpose(
                    x, np.flip(w, tuple(range(2, 2 + many))), geometry.strides, geometry.padding,
                    rhs_dilation=geometry.dilation, dimension_numbers=("NC" + spatial, "IO" + spatial, "NC" + spatial),
                )
            )  # fmt: skip
        except (ValueError, TypeError):  # nothing is left of the input
            return
    if 0 in want.shape:
        return
    functional = torch.nn.functional
    call = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[many - 1]
    made = torch_transposed(geometry, kernel)
    late = any(low < 0 or high < 0 for low, high in made.extra)  # then the bias comes behind
    options = {"stride": geometry.strides, "dilation": geometry.dilation}
    try:
        y = call(
            torch.tensor(x), torch.tensor(w), None if late else torch.tensor(b), padding=made.padding,
            output_padding=made.output_padding, **options,
        )  # fmt: skip
    except RuntimeError as error:  # torch makes no empty result, even if zeros would be put around it
        assert "too small" in str(error) and late
        return
    y = functional.pad(y, [-n for pair in reversed(made.extra) for n in pair])
    b = b.reshape(-1, *[1] * many)
    got = y.numpy() + (b if late else 0)
    np.testing.assert_allclose(got, want + b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("padding", "kernel", "strides", "size", "said"),
    [
        ("SAME", 3, 1, (), "padding=(1,)"),
        ("SAME", 4, 1, (), "padding='same' (it is F.pad(x, (1, 2)), then padding=0)"),
        ("SAME", 3, 2, (8,), "F.pad(x, (0, 1)), then padding=0"),
        ("SAME", 3, 2, (9,), "padding=(1,)"),
        ("SAME", 3, 2, (), "F.pad(x, (W low, W high)), then padding=0, where (low, high) is (0, 1) for sizes 2m and (1, 1) for sizes 2m+1 of W"),
        ("SAME", 1, 2, (), "padding=(0,)"),
        ("SAME_LOWER", 4, 1, (), "F.pad(x, (2, 1)), then padding=0; or padding=(2,), and the end of the result cut off"),
        ("CAUSAL", 3, 1, (), "F.pad(x, (2, 0)), then padding=0; or padding=(2,), and the end of the result cut off"),
        ("VALID", 3, 2, (), "padding=(0,)"),
        (((1, 2),), 3, 2, (), "F.pad(x, (1, 2)), then padding=0"),
        (((-1, -1),), 3, 2, (), "F.pad(x, (-1, -1)), then padding=0"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_convolution(padding: Any, kernel: int, strides: int, size: Any, said: str) -> None:
    assert torch_padding(Geometry(padding, (strides,), (1,), size), (kernel,), "W").text == said


@pytest.mark.parametrize(
    ("padding", "kernel", "strides", "said", "crop"),
    [
        ("SAME", 3, 2, "padding=(0,), output_padding=(0,), then F.pad(y, (0, -1)), which takes off what is negative: torch's arguments alone cannot express this crop", (0, 1)),
        ("SAME", 4, 2, "padding=(1,), output_padding=(0,)", (1, 1)),
        ("SAME", 2, 3, "padding=(0,), output_padding=(1,)", (0, -1)),
        ("VALID", 3, 2, "padding=(0,), output_padding=(0,)", (0, 0)),
        ("VALID", 1, 3, "padding=(0,), output_padding=(2,)", (0, -2)),
        (((1, 1),), 3, 2, "padding=(1,), output_padding=(0,)", (1, 1)),
        (((3, 2),), 3, 2, "padding=(0,), output_padding=(0,), then F.pad(y, (1, 0)), without the bias, which is added behind it, which takes off what is negative: torch's arguments alone cannot express this crop", (-1, 0)),
    ],
)  # fmt: skip
def test_what_is_said_of_a_transposed_one(
    padding: Any, kernel: int, strides: int, said: str, crop: tuple[int, int]
) -> None:
    geometry = Geometry(padding, (strides,), (1,))
    assert torch_transposed_padding(geometry, (kernel,)).text == said
    assert crops(geometry, (kernel,)) == (crop,)


CONV = "- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQIO\n  from: k\n  {}\n  {}: m"


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        ("padding: SAEM", "conv", "r.yaml:8:12: expected one of SAME, SAME_LOWER, VALID, CAUSAL, or a pair for each spatial axis such as [[0, 1], [0, 1]], got 'SAEM'; did you mean 'SAME'?"),
        ("padding: same", "conv", "r.yaml:8:12: expected one of SAME, SAME_LOWER, VALID, CAUSAL, or a pair for each spatial axis such as [[0, 1], [0, 1]], got 'same'; did you mean 'SAME'?"),
        ("padding: CIRCULAR", "conv", "got 'CIRCULAR'; leave it out: a rule cannot express wrapped or reflected padding (torch's `padding_mode`)"),
        ("padding: [[0, 1, 2]]", "conv", "r.yaml:8:12: expected one of"),
        ("padding: [1]", "conv", "r.yaml:5:3: `padding:` has 1 pairs, and the convolution 2 spatial axes"),
        ("padding: CAUSAL", "conv", "r.yaml:5:3: `padding: CAUSAL` is flax's for one spatial axis, time"),
        ("padding: SAME_LOWER", "conv_transpose", "r.yaml:5:3: a transposed convolution has no padding SAME_LOWER: SAME, VALID or pairs"),
        ("strides: 2", "conv", "r.yaml:5:3: `strides:` requires `padding:` (the default is SAME in flax, VALID in Equinox)"),
        ("padding: SAME\n  strides: [1, 2, 3]", "conv", "r.yaml:5:3: `strides:` has 3 numbers, and the convolution 2 spatial axes"),
        ("padding: SAME\n  dilation: 0", "conv", "r.yaml:5:3: `dilation:` is 1 or more, not 0"),
        ("padding: SAME\n  transpose_kernel: true\n  feature_group_count: 2", "conv_transpose", "r.yaml:5:3: jax.lax.conv_transpose has no groups, so `transpose_kernel` goes with one group"),
        ("weight_standardization: w / std", "conv", "r.yaml:8:27: 'w / std' is not a known standardization: (w - mean) / (std + 1e-5) (big_vision), or (w - mean) / sqrt(var + 1e-5)"),
        ("weight_norm: g\n  spectral_norm: u", "conv", "r.yaml:5:3: a weight has `weight_norm` or `spectral_norm`, not both"),
        ("normalization_epsilon: 1e-12", "conv", "r.yaml:5:3: `normalization_epsilon` requires `weight_norm` or `spectral_norm`"),
    ],
)  # fmt: skip
def test_errors_of_a_rule(key: str, kind: str, said: str) -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(CONV.format(key, kind))
    assert said in str(refused.value)


def test_axes_in_two_orders_are_refused() -> None:
    """jax.lax takes strides in the kernel's order, torch in the input's."""
    with pytest.raises(RuleError) as refused:
        rule_file(CONV.format("padding: SAME", "conv").replace("HWIO", "WHIO"))
    assert "the kernel of NHWC,WHIO->NHWC has its spatial axes in the order W H, and the input H W; `padding`" in str(
        refused.value
    )


def test_the_plan_says_what_torch_needs() -> None:
    rules = rule_file(CONV.format("padding: SAME\n  strides: 2\n  input_size: [8, 9]", "conv"))
    (layer,) = make_plan(rules, MemorySource({"k": np.zeros((3, 3, 2, 4), np.float32)})).layers
    assert layer["target_padding"] == "F.pad(x, (1, 1, 0, 1)), then padding=0" and layer["strides"] == [2, 2]


def test_a_kernel_that_does_not_make_the_groups() -> None:
    rules = rule_file(
        "- dimension_numbers: NCH,OIH->NCH\n  axes: OIP\n  feature_group_count: 3\n  from: k\n  conv_transpose: m"
    )
    with pytest.raises(PlanError) as refused:
        make_plan(rules, MemorySource({"k": np.zeros((4, 2, 3), np.float32)}))
    assert "k: float32[4,2,3] as O I P: O = 4 output channels do not make 3 groups" in str(refused.value)
