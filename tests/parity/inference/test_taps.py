"""A convolution whose taps the JAX model multiplies by themselves: shifted data times a matrix for each, or side by side times one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import UNPROVEN, derive, floats, grades, rules

SLOW = pytest.mark.slow
TAPS, IN, OUT, STEP = 3, 4, 6, 2


class Causal(torch.nn.Module):
    """Pads in front of the values, or in the convolution with what is behind cut off."""

    def __init__(self, step: int = STEP, cut: bool = False) -> None:
        super().__init__()
        self.reach, self.cut = (TAPS - 1) * step, cut
        self.c = torch.nn.Conv1d(IN, OUT, TAPS, dilation=step, padding=self.reach if cut else 0)
        self.o = torch.nn.Linear(OUT, 5)

    def forward(self, x: Any) -> Any:
        x = x.transpose(1, 2)
        y = self.c(x)[..., : x.shape[-1]] if self.cut else self.c(torch.nn.functional.pad(x, (self.reach, 0)))
        return self.o(torch.tanh(y).transpose(1, 2))


class Ahead(Causal):
    """Sees one place too far."""

    def forward(self, x: Any) -> Any:
        y = self.c(torch.nn.functional.pad(x.transpose(1, 2), (self.reach - 1, 1)))
        return self.o(torch.tanh(y).transpose(1, 2))


REST = {"b": (OUT,), "o": (OUT, 5), "ob": (5,)}
KERNELS: dict[str, dict[str, tuple[int, ...]]] = {
    "one leaf": {"k": (TAPS, IN, OUT)},
    "a leaf for each": {f"k{tap}": (IN, OUT) for tap in range(TAPS)},
    "side by side": {"k": (TAPS * IN, OUT)},
}


def by_taps(way: str, w: Any, x: Any) -> Any:
    padded = jnp.pad(x, ((0, 0), ((TAPS - 1) * STEP, 0), (0, 0)))
    moved = [padded[:, tap * STEP : tap * STEP + x.shape[1]] for tap in range(TAPS)]
    if way == "side by side":
        y = jnp.concatenate(moved, -1) @ w["k"]
    else:
        y = sum(part @ (w["k"][tap] if way == "one leaf" else w[f"k{tap}"]) for tap, part in enumerate(moved))
    return jnp.tanh(y + w["b"]) @ w["o"] + w["ob"]


@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("way", ["one leaf", pytest.param("a leaf for each", marks=SLOW), "side by side"])
def test_a_sum_of_products_is_a_convolution(way: str, cut: bool) -> None:
    module = Causal(cut=cut)
    found = derive(lambda w, x: by_taps(way, w, x), module, {**KERNELS[way], **REST}, floats(3, 9, IN))
    assert grades(found) == {Grade.DERIVED}
    written = rules(found, module)
    expected = {
        "one leaf": "- dimension_numbers: NWC,WIO->NWC\n  axes: PDC\n  from: k\n  bias: b\n",
        "a leaf for each": '- from: "{k0,k1,k2}"\n  axes: CD\n  parameter: {name: c.weight, axes: "DC(1 + 1 + 1)"}',
        "side by side": '- einsum: "...(P D),(P D)C->...C"\n  from: k\n  bias: b\n',
    }[way]
    assert any(rule.startswith(expected) for rule in written), written


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Causal(step=1), "the target has dilation (1,), and the JAX model (2,)"),
        (Ahead(), "the target pads (3, 1) with zeros, and the JAX model (4, 0) with zeros"),
    ],
)
@pytest.mark.parametrize("way", ["one leaf", pytest.param("a leaf for each", marks=SLOW)])
def test_another_dilation_or_padding_than_that_of_the_sum_is_named(way: str, module: Causal, expected: str) -> None:
    found = derive(lambda w, x: by_taps(way, w, x), module, {**KERNELS[way], **REST}, floats(3, 9, IN))
    assert not found.complete and grades(found) <= UNPROVEN
    (difference,) = found.differences
    assert difference.brief.startswith("in c: ") and expected in difference.brief


@SLOW
def test_a_sum_of_products_on_a_map_is_a_convolution() -> None:
    def function(w: Any, x: Any) -> Any:
        moved = jnp.pad(x, ((0, 0), (2, 2), (1, 1), (0, 0)))
        parts = [moved[:, 2 * i : 2 * i + 9 : 2, j : j + 8] @ w["k"][i, j] for i in range(3) for j in range(3)]
        return jnp.tanh(sum(parts))

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = torch.nn.Conv2d(IN, OUT, 3, stride=(2, 1), padding=(2, 1), dilation=(2, 1), bias=False)

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.c(x.movedim(-1, 1)).movedim(1, -1))

    (rule,) = rules(derive(function, Module(), {"k": (3, 3, IN, OUT)}, floats(2, 9, 8, IN)), Module())
    assert rule.startswith("- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQDC\n  from: k\n")


@pytest.mark.parametrize("step", [1, pytest.param(3, marks=SLOW)])
def test_taps_at_other_distances_are_a_difference(step: int) -> None:
    found = derive(
        lambda w, x: by_taps("one leaf", w, x), Causal(step), {**KERNELS["one leaf"], **REST}, floats(3, 9, IN)
    )
    (difference,) = found.differences
    assert "the target convolves with c.weight" in difference.problem and grades(found) <= UNPROVEN


@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=SLOW)])
def test_filter_and_gate_in_one_convolution(layers: int) -> None:
    """A WaveNet: the module has both in one kernel, and the JAX model a kernel of two taps for each; layers after the first cost a few candidates."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dilated = torch.nn.ModuleList(torch.nn.Conv1d(IN, 2 * IN, 2, dilation=2**k) for k in range(layers))
            self.mix = torch.nn.ModuleList(torch.nn.Conv1d(IN, IN, 1) for _ in range(layers))

        def forward(self, x: Any) -> Any:
            x = x.transpose(1, 2)
            for k, (dilated, mix) in enumerate(zip(self.dilated, self.mix, strict=True)):
                value, gate = dilated(torch.nn.functional.pad(x, (2**k, 0))).chunk(2, 1)
                x = x + mix(torch.tanh(value) * torch.sigmoid(gate))
            return x.transpose(1, 2)

    def function(w: Any, x: Any) -> Any:
        for k in range(layers):
            before = jnp.pad(x, ((0, 0), (2**k, 0), (0, 0)))[:, : -(2**k)]
            value, gate = (before @ w[f"{n}{k}"][0] + x @ w[f"{n}{k}"][1] + w[f"{n}b{k}"] for n in ("f", "g"))
            x = x + (jnp.tanh(value) / (1 + jnp.exp(-gate))) @ w[f"m{k}"] + w[f"mb{k}"]
        return x

    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(layers):
        shapes |= {f"f{k}": (2, IN, IN), f"fb{k}": (IN,), f"g{k}": (2, IN, IN), f"gb{k}": (IN,)}
        shapes |= {f"m{k}": (IN, IN), f"mb{k}": (IN,)}
    module = Module()
    found = derive(function, module, shapes, floats(3, 9, IN))
    assert grades(found) == {Grade.DERIVED} and found.tried < 20 * layers
    assert any("{" in rule or layers == 1 for rule in rules(found, module))


class Taps(torch.nn.Module):
    """Three layers whose taps the module multiplies by themselves; `depthwise`: one filter for each channel."""

    def __init__(self, depthwise: bool, ahead: int = 0) -> None:
        super().__init__()
        shape = (IN, TAPS) if depthwise else (IN, IN, TAPS)
        self.k = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for _ in range(3))
        self.b = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(IN)) for _ in range(3))
        self.o, self.ahead = torch.nn.Linear(IN, 5), ahead

    def forward(self, x: Any) -> Any:
        for k, b in zip(self.k, self.b, strict=True):
            padded = torch.nn.functional.pad(x, (0, 0, TAPS - 1 - self.ahead, self.ahead))
            moved = [padded[:, tap : tap + x.shape[1]] for tap in range(TAPS)]
            taps = (part * k[:, j] if k.ndim == 2 else part @ k[..., j].T for j, part in enumerate(moved))
            x = x + torch.tanh(sum(taps) + b)
        return self.o(x)


def convolved(depthwise: bool) -> tuple[Any, dict[str, tuple[int, ...]]]:
    def function(w: Any, x: Any) -> Any:
        for i in range(3):
            numbers, groups = ("NWC", "WIO", "NWC"), IN if depthwise else 1
            y = jax.lax.conv_general_dilated(x, w[f"k{i}"], (1,), [(TAPS - 1, 0)], None, None, numbers, groups)
            x = x + jnp.tanh(y + w[f"b{i}"])
        return x @ w["o"] + w["ob"]

    of_each = {"k": (TAPS, 1 if depthwise else IN, IN), "b": (IN,)}
    return function, {f"{n}{i}": of for i in range(3) for n, of in of_each.items()} | {"o": (IN, 5), "ob": (5,)}


@pytest.mark.slow
@pytest.mark.parametrize("depthwise", [False, True])
def test_a_convolution_is_a_sum_over_the_taps_of_the_module(depthwise: bool) -> None:
    function, shapes = convolved(depthwise)
    module = Taps(depthwise)
    found = derive(function, module, shapes, floats(2, 9, IN))
    assert grades(found) == {Grade.DERIVED}
    stored, own = ("C.D", "DC") if depthwise else ("ECD", "DCE")
    kernels = f'- from: k{{i}}\n  axes: {stored}\n  parameter: {{name: "k.{{i}}", axes: {own}}}'
    assert kernels in rules(found, module)


@pytest.mark.slow
def test_taps_of_the_module_that_see_one_place_too_far() -> None:
    """Planted."""
    function, shapes = convolved(False)
    assert not derive(function, Taps(False, ahead=1), shapes, floats(2, 9, IN)).complete


@pytest.mark.slow
def test_data_that_is_rolled_is_a_circular_convolution() -> None:
    """As the embedding of values of an Autoformer: the padded data is no value of the source, but its patches are."""

    def function(w: Any, x: Any) -> Any:
        near = jnp.stack([jnp.roll(x, 1, 1), x, jnp.roll(x, -1, 1)])
        return jnp.tanh(jnp.einsum("nbti,nio->bto", near, w["taps"])) @ w["o"]

    class Circular(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = torch.nn.Conv1d(IN, 7, 3, padding=1, padding_mode="circular", bias=False)
            self.o = torch.nn.Linear(7, 5, bias=False)

        def forward(self, x: Any) -> Any:
            return self.o(self.k(x.mT).mT.tanh())

    found = derive(function, Circular(), {"taps": (3, IN, 7), "o": (7, 5)}, floats(2, 9, IN))
    assert grades(found) == {Grade.DERIVED}
    shifted = derive(
        lambda w, x: function(w, jnp.roll(x, 1, 1)), Circular(), {"taps": (3, IN, 7), "o": (7, 5)}, floats(2, 9, IN)
    )
    assert not shifted.complete, "planted"


def test_taps_of_which_several_axes_are_channels_have_a_rule() -> None:
    """As those of queries, keys and values, of each head, in a gated DeltaNet."""
    heads = 2

    def function(w: Any, x: Any) -> Any:
        y = jnp.einsum("btd,dchk->btchk", x, w["in"])
        padded = jnp.pad(y, ((0, 0), (2, 0), (0, 0), (0, 0), (0, 0)))
        y = jnp.tanh(sum(padded[:, k : k + x.shape[1]] * w["taps"][k] for k in range(3)))
        return (y[:, :, 0] * jnp.cos(y[:, :, 1])).reshape(*x.shape[:2], -1) @ w["o"]

    class Apart(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.i, self.o = (
                torch.nn.ModuleList(torch.nn.Linear(IN, 6, bias=False) for _ in range(2)),
                torch.nn.Linear(6, 5, bias=False),
            )
            self.k = torch.nn.ModuleList(torch.nn.Conv1d(6, 6, 3, groups=6, padding=2, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            one, two = (torch.tanh(k(i(x).mT)[..., : x.shape[1]].mT) for i, k in zip(self.i, self.k, strict=True))
            return self.o(one * two.cos())

    module = Apart()
    shapes = {"in": (IN, 2, heads, 3), "taps": (3, 2, heads, 3), "o": (6, 5)}
    found = derive(function, module, shapes, floats(2, 9, IN))
    assert grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}  # heads and their features may change places in all
    kernels = '- from: taps\n  stacked: {j: 1}\n  axes: PFG\n  parameter: {name: "k.{j}.weight", axes: "(F G).P"}'
    assert kernels in rules(found, module)
