"""`infer` derives gates whose products depend on other gates, as Haiku's GRU, and cells that add their state; a fault in either is never derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import convert
from convert.layers.torch_modules import GRU
from support.inferred import derive, floats, linen, rules, sources

WIDTH = 6
GIVEN = floats(3, 5, WIDTH)
SLOW = pytest.mark.slow


def haiku_gru() -> tuple[Callable[[Mapping[str, Any], Any], Any], dict[str, tuple[int, ...]]]:
    """Haiku's GRU and a layer: the reset gate multiplies the state in front of the matrix, the update gate the new state."""

    @hk.without_apply_rng
    @hk.transform
    def model(x: Any) -> Any:
        core = hk.GRU(WIDTH, name="gru")
        states, _ = hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)
        return hk.Linear(WIDTH, name="out")(states)

    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((3, 5, WIDTH)))
    shapes = {f"{module}/{name}": leaf.shape for module, leaves in tree.items() for name, leaf in leaves.items()}
    return lambda leaves, x: model.apply(convert.fill_pytree(tree, leaves), x), shapes


class OwnLayer(nn.Module):
    """A layer with the gates r, z and n in one matrix."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.gru, self.out = layer, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.out(self.gru(x)[0])


Gate = Callable[..., Any]


class OwnLoop(nn.Module):
    """A matrix for each gate."""

    def __init__(self, new: Gate, mix: Gate) -> None:
        super().__init__()
        self.ir, self.iz, self.i_n, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.hr, self.hz, self.hn = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.new, self.mix = new, mix

    def forward(self, x: Any) -> Any:
        h, made = x.new_zeros(len(x), WIDTH), []
        for v in x.unbind(1):
            r, z = torch.sigmoid(self.ir(v) + self.hr(h)), torch.sigmoid(self.iz(v) + self.hz(h))
            n = torch.tanh(self.new(self.i_n(v), self.hn, r, z, h))
            h = self.mix(z, n, h)
            made.append(h)
        return self.out(torch.stack(made, 1))


def reset(i: Any, matrix: Any, r: Any, z: Any, h: Any) -> Any:
    return i + matrix(r * h)


def keep(z: Any, n: Any, h: Any) -> Any:
    return (1 - z) * n + z * h


def test_a_gru_that_resets_the_state_before_the_matrix_is_the_cell_of_its_library() -> None:
    function, shapes = haiku_gru()
    module = OwnLayer(GRU(WIDTH, WIDTH, batch_first=True, reset="before"))
    written = rules(derive(function, module, shapes, GIVEN), module)
    assert written[0].splitlines() == ["- cell: haiku.GRU", "  from: gru", "  gru: gru"]


@pytest.mark.parametrize(
    "mix",
    [
        keep,
        pytest.param(lambda z, n, h: n + z * (h - n), marks=SLOW),
        pytest.param(lambda z, n, h: (1 - z) * h + z * n, marks=SLOW),
    ],
)
def test_a_gru_with_a_matrix_for_each_gate_may_negate_its_update_gate(mix: Gate) -> None:
    function, shapes = haiku_gru()
    found = derive(function, OwnLoop(reset, mix), shapes, GIVEN)
    assert found.complete and {sources(t) for t in found.tensors if t.name.endswith("n.weight")} == {
        "gru/w_i",
        "gru/w_h",
    }


FAULTS: dict[str, Callable[[], nn.Module]] = {
    "torch's GRU": lambda: OwnLayer(nn.GRU(WIDTH, WIDTH, batch_first=True)),
    "the reset behind the matrix": lambda: OwnLoop(lambda i, matrix, r, z, h: i + r * matrix(h), keep),
    "no reset": lambda: OwnLoop(lambda i, matrix, r, z, h: i + matrix(h), keep),
    "the reset is the rest": lambda: OwnLoop(lambda i, matrix, r, z, h: i + matrix((1 - r) * h + r * i), keep),
    "the input is reset, too": lambda: OwnLoop(lambda i, matrix, r, z, h: r * i + matrix(r * h), keep),
    "the old state is kept whole": lambda: OwnLoop(reset, lambda z, n, h: (1 - z) * n + h),
    "the gates are not one": lambda: OwnLoop(reset, lambda z, n, h: (1 - z) * n + 0.99 * z * h),
}  # fmt: skip


@SLOW
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_gru_is_never_derived(fault: str) -> None:
    function, shapes = haiku_gru()
    found = derive(function, FAULTS[fault](), shapes, GIVEN)
    assert not found.complete and found.proof is None and len(found.differences) == 1


# ---- a cell that adds its state


class Residual(nn.Module):
    """torch's RNN, whose result `behind` changes."""

    def __init__(self, behind: Callable[[Any], Any] = lambda y: y) -> None:
        super().__init__()
        self.rnn, self.out, self.behind = nn.RNN(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH), behind

    def forward(self, x: Any) -> Any:
        return self.out(self.behind(self.rnn(x)[0]))


def simple(
    add: float = 1.0, outside: float = 0.0
) -> tuple[Callable[[Mapping[str, Any], Any], Any], dict[str, tuple[int, ...]]]:
    """flax's SimpleCell and a layer; or one that adds its state in another way."""
    square = (WIDTH, WIDTH)
    shapes = {"i/kernel": square, "i/bias": (WIDTH,), "h/kernel": square, "out/kernel": square}

    def function(leaves: Mapping[str, Any], x: Any) -> Any:
        h, made = jnp.zeros((len(x), WIDTH)), []
        for v in x.swapaxes(0, 1):
            y = v @ leaves["i/kernel"] + leaves["i/bias"] + h @ leaves["h/kernel"]
            h = jnp.tanh(y + add * h) + outside * h
            made.append(h)
        return jnp.stack(made, 1) @ leaves["out/kernel"]

    return function, shapes


def test_a_state_that_is_added_is_in_the_matrix_of_the_state() -> None:
    import flax.linen as fl

    class Model(fl.Module):
        @fl.compact
        def __call__(self, x: Any) -> Any:
            return fl.Dense(WIDTH)(fl.RNN(fl.SimpleCell(WIDTH, residual=True))(x))

    function, shapes = linen(Model(), jnp.zeros((3, 5, WIDTH)))
    module = Residual()
    written = rules(derive(function, module, shapes, GIVEN), module)
    assert written[0].splitlines()[0] == "- cell: flax.linen.SimpleCell(residual=True)"


@SLOW
@pytest.mark.parametrize(("add", "outside"), [(2.0, 0.0), (0.0, 1.0), (1.0, 0.5), (-1.0, 0.0)])
def test_a_state_that_is_added_otherwise_is_never_derived(add: float, outside: float) -> None:
    function, shapes = simple(add, outside)
    found = derive(function, Residual(), shapes, GIVEN)
    assert not found.complete and found.proof is None
