"""Laws of the kinds of convolutions and folds, for any dimension numbers, groups and orders; float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import convert
from convert.core import ops
from convert.core.tensor_spec import TensorSpec
from convert.core.weight_norm_ops import Features, Operand, SpectralNorm, Standardize, WeightNorm
from convert.layers import ConvTranspose
from convert.layers.transforms import weight_transforms
from convert.planning.planner import make_plan
from support.memory_source import MemorySource, rule_file, run
from support.weight_matrix import back, matrix

TORCH = (
    torch.nn.functional.conv_transpose1d,
    torch.nn.functional.conv_transpose2d,
    torch.nn.functional.conv_transpose3d,
)
HEAD = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\n"


@st.composite
def transposed(draw: st.DrawFn) -> dict[str, Any]:
    spatial = "XYZ"[: draw(st.integers(1, 3))]
    mix = lambda letters: "".join(draw(st.permutations(letters)))  # noqa: E731
    turned = draw(st.booleans())
    return {
        "input": mix("NC" + spatial),
        "kernel": mix("OI" + spatial),
        "result": mix("NC" + spatial),
        "spatial": spatial,
        "turned": turned,
        "groups": 1 if turned else draw(st.integers(1, 3)),
        "in": draw(st.integers(1, 3)),
        "out": draw(st.integers(1, 3)),
        "stride": draw(st.integers(1, 3)),
        "stacked": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def law(c: dict[str, Any]) -> None:
    """torch's transposed convolution with the derived kernel is JAX's with the stored one."""
    rng = np.random.default_rng(c["seed"])
    groups, spatial = c["groups"], c["spatial"]
    ins, outs = c["in"] * groups, c["out"] * groups
    sizes = {"N": 2, **dict(zip("XYZ", (2, 3, 4), strict=True))}
    sizes |= {"O": ins, "I": outs} if c["turned"] else {"O": outs, "I": c["in"]}
    kernel = rng.standard_normal([sizes[a] for a in c["kernel"]])
    x = rng.standard_normal([ins if a == "C" else sizes[a] for a in c["input"]])
    numbers = (c["input"], c["kernel"], c["result"])
    many, stride = len(spatial), c["stride"]
    with jax.enable_x64(True):
        if groups == 1:
            want = jax.lax.conv_transpose(
                x, kernel, [stride] * many, "VALID", dimension_numbers=numbers, transpose_kernel=c["turned"]
            )
        else:  # as Equinox calls it
            taps = [sizes[a] for a in c["kernel"] if a not in "OI"]  # jax.lax takes numbers in the kernel's order
            sides = [(k - 1, k - 1 + max(stride - k, 0)) for k in taps]
            want = jax.lax.conv_general_dilated(x, kernel, [1] * many, sides, [stride] * many, None, numbers, groups)
    names = dict(zip("OIXYZ", "ABKLM", strict=True))
    rule = f'- dimension_numbers: "{c["input"]},{c["kernel"]}->{c["result"]}"\n  axes: {"".join(names[a] for a in c["kernel"])}\n'
    rule += f"  transpose_kernel: {str(c['turned']).lower()}\n  from: k\n" + (
        f"  feature_group_count: {groups}\n" if groups > 1 else ""
    )
    rule += "  stacked: {i: 0}\n  conv_transpose: m.{i}\n" if c["stacked"] else "  conv_transpose: m\n"
    tree = {"k": np.stack([np.zeros_like(kernel), kernel]) if c["stacked"] else kernel}
    plan = make_plan(rule_file(rule), MemorySource(tree))
    weight = run(plan)["m.1.weight" if c["stacked"] else "m.weight"]
    order = "NC" + "".join(a for a in c["input"] if a not in "NC")
    more = [max(stride - sizes[a], 0) for a in order[2:]]
    moved = torch.tensor(np.einsum(f"{c['input']}->{order}", x))
    got = TORCH[many - 1](moved, torch.tensor(weight.copy()), stride=stride, output_padding=more, groups=groups).numpy()
    wanted = np.einsum(f"{c['result']}->{order}", np.asarray(want))
    assert np.abs(got - wanted).max() <= 1e-12 * np.abs(wanted).max()
    (part,) = plan.steps[-1].parts  # and the operations lead back
    back = ops.apply(ops.inverse(part.ops, TensorSpec(tree["k"].shape, "float64")), weight)
    assert np.array_equal(back[1] if c["stacked"] else back, kernel)


@pytest.mark.slow
@given(transposed())
@settings(max_examples=25, deadline=None)
def test_the_derived_kernel_is_the_transposed_convolution(case: dict[str, Any]) -> None:
    law(case)


@pytest.mark.parametrize("name", ["turned", "inner_axes", "groups"])
def test_the_law_catches_a_wrong_derivation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"input": "NXYC", "kernel": "YXOI", "result": "NXYC", "spatial": "XY", "turned": False, "groups": 2, "in": 2, "out": 2, "stride": 2, "stacked": False, "seed": 0}  # fmt: skip
    law(case)
    faults: dict[str, Any] = {
        "turned": lambda self, role, layer: (),
        "inner_axes": lambda self, role, letters, shape, sizes: (letters, shape),
        "groups": lambda self, role, letters, variant, layer: tuple(letters),
    }
    monkeypatch.setattr(ConvTranspose, name, faults[name])
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        law(case)


@st.composite
def maps(draw: st.DrawFn) -> dict[str, Any]:
    order = "".join(draw(st.permutations("PQRS"[: draw(st.integers(2, 4))])))
    return {
        "order": order,
        "target": draw(st.none() | st.permutations(order).map("".join)),
        "sizes": [draw(st.integers(1, 4)) for _ in order],
        "out": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def flattening(c: dict[str, Any]) -> None:
    """The target's Linear on a map that it flattens in its own order is the source's on one flattened in the source's."""
    rng = np.random.default_rng(c["seed"])
    order, sizes = c["order"], dict(zip(c["order"], c["sizes"], strict=True))
    wide = int(np.prod(c["sizes"]))
    target = c["target"] or order[-1] + order[:-1]
    axes = "axes: {" + ", ".join(f"{x}: {{is: size, equals: {n}}}" for x, n in sizes.items()) + "}\n"
    to = f"{{module: m, flattened: {c['target']}}}" if c["target"] else "m"
    flat = "F" if c["out"] else "D"
    rule = f"- einsum: ...D,DF->...F\n  from: w\n  bias: b\n  flattened: {{{flat}: {order}}}\n  linear: {to}"
    w = rng.standard_normal((5, wide) if c["out"] else (wide, 5))
    b = rng.standard_normal(w.shape[1])
    plan = make_plan(rule_file(rule, HEAD + axes), MemorySource({"w": w, "b": b}))
    made = run(plan)
    if c["out"]:
        x = rng.standard_normal((2, 5))
        want = (x @ w + b).reshape(2, *c["sizes"])
        got = (x @ made["m.weight"].T + made["m.bias"]).reshape(2, *(sizes[a] for a in target))
        got = np.einsum(f"Z{target}->Z{order}", got)
    else:
        x = rng.standard_normal((2, *c["sizes"]))
        want = x.reshape(2, -1) @ w + b
        got = np.einsum(f"Z{order}->Z{target}", x).reshape(2, -1) @ made["m.weight"].T + made["m.bias"]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
    for step in plan.steps:
        (part,) = step.parts
        leaf = {"w": w, "b": b}[part.leaf]
        assert np.array_equal(
            ops.apply(ops.inverse(part.ops, TensorSpec(leaf.shape, "float64")), made[step.name]), leaf
        )


@given(maps())
@settings(max_examples=60, deadline=None)
def test_a_map_flattened_in_any_order(case: dict[str, Any]) -> None:
    flattening(case)


def test_the_law_of_flattening_catches_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {"order": "PQR", "target": None, "sizes": [2, 3, 4], "out": False, "seed": 0}
    flattening(case)
    monkeypatch.setattr(weight_transforms, "target_order", lambda rule, layer: rule.flattened.order)
    with pytest.raises(AssertionError):
        flattening(case)


# ---- folds


def operand(value: np.ndarray) -> Operand:
    return Operand("second", (), value.size, lambda name: value)


weights = st.tuples(st.integers(1, 5), st.integers(2, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))


@given(weights)
@settings(max_examples=40, deadline=None)
def test_laws_of_folds(case: tuple[int, int, int, int]) -> None:
    """Rows of a weight norm are as long as its scale; sigma of a matrix from its own singular vector is its norm; a
    standardised filter has mean 0 and deviation 1; none depends on a positive factor, and all keep the dtype."""
    rows, columns, taps, seed = case
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, columns, taps + 1))
    scale = rng.standard_normal(rows)
    flat = w.reshape(rows, -1)
    unit = WeightNorm(operand(scale), 0.0, Features(w.shape))
    np.testing.assert_allclose(np.linalg.norm(unit.apply(w).reshape(rows, -1), axis=1), np.abs(scale), rtol=1e-12)
    u = np.linalg.svd(flat)[0][:, 0]
    spectral = SpectralNorm(operand(u), 0.0, Features(w.shape))
    np.testing.assert_allclose(np.linalg.norm(spectral.apply(w).reshape(rows, -1), 2), 1.0, rtol=1e-9)
    for axes in ((), (1,), (2, 0), (0, 1, 2)):
        of = Features(w.shape, axes)
        assert matrix(of, w).shape == (of.count, of.rest) and of.count * of.rest == w.size
        np.testing.assert_array_equal(back(of, matrix(of, w), (w.size,)), w.reshape(-1))
        numbers = rng.standard_normal(of.count)
        folded = WeightNorm(operand(numbers), 0.0, of).apply(w)
        np.testing.assert_allclose(np.linalg.norm(matrix(of, folded), axis=1), np.abs(numbers), rtol=1e-12)
    standard = Standardize(0, 0.0, inside=bool(seed % 2))
    made = standard.apply(w).reshape(rows, -1)
    np.testing.assert_allclose(made.mean(1), 0, atol=1e-12)
    np.testing.assert_allclose(made.std(1), 1, rtol=1e-12)
    for op in (unit, spectral, standard):
        np.testing.assert_allclose(op.apply(3 * w), op.apply(w), rtol=1e-12, atol=1e-12)
        assert op.apply(w.astype(np.float32)).dtype == np.float32
        assert op.out_spec(TensorSpec(w.shape, "float32")) == TensorSpec(w.shape, "float32")
        with pytest.raises(ValueError, match="would lose bits; cast to float32 first"):
            op.out_spec(TensorSpec(w.shape, "bfloat16"))
        with pytest.raises(ValueError, match="needs a weight with an output axis and others"):
            op.out_spec(TensorSpec((rows,), "float32"))


def test_stacked_layers_have_a_scale_each() -> None:
    """A scan stacks kernels and scales alike; each layer takes its own."""
    rng = np.random.default_rng(0)
    tree = {"w": rng.standard_normal((3, 4, 5)), "g": rng.standard_normal((3, 5)), "u": rng.standard_normal((3, 1, 5))}
    rule = "- einsum: ...D,DK->...K\n  from: w\n  weight_norm: g\n  stacked: {{i: 0}}\n  linear: {}"
    made = run(make_plan(rule_file(rule.format('"m.{i}"')), MemorySource({k: tree[k] for k in "wg"})))
    for i in range(3):
        want = (tree["w"][i] / np.linalg.norm(tree["w"][i], axis=0) * tree["g"][i]).T
        np.testing.assert_allclose(made[f"m.{i}.weight"], want, rtol=1e-11)
    with pytest.raises(convert.PlanError) as refused:
        make_plan(rule_file(rule.format('"m.{i}"')), MemorySource({"w": tree["w"], "g": tree["g"][:2]}))
    said = "float64[2,5] does not fit the weight w: float64[3,4,5]: element 2 of axis 0 is not in float64[2,5]; it is stacked on other axes than the weight"
    assert said in str(refused.value)
    kept = run(
        make_plan(
            rule_file(rule.format('{module: "m.{i}", parametrization: old_weight_norm}')),
            MemorySource({k: tree[k] for k in "wg"}),
        )
    )
    assert all(np.array_equal(kept[f"m.{i}.weight_g"], tree["g"][i][:, None]) for i in range(3))
    assert all(np.array_equal(kept[f"m.{i}.weight_v"], tree["w"][i].T) for i in range(3))
    spectral = rule.format('"m.{i}"').replace("weight_norm: g", "spectral_norm: u")
    made = run(make_plan(rule_file(spectral), MemorySource({k: tree[k] for k in "wu"})))
    for i in range(3):
        w, v = tree["w"][i], tree["u"][i] @ tree["w"][i].T
        v = v / np.linalg.norm(v)
        np.testing.assert_allclose(made[f"m.{i}.weight"], w.T / np.linalg.norm(v @ w), rtol=1e-11)
