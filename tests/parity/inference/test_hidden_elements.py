"""Values of which a part is hidden later: one program computes what another leaves out, and the rest must be equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from convert.inference.derivation import Derivation, Grade
from convert.inference.forms.hidden.shown import hidden_elements, shown_alone
from convert.inference.infer import infer
from convert.programs.record_torch import few_threads, record_torch
from convert.programs.rerun import rerun
from support.inferred import derive, floats, grades, layer_norm, sources

B, T, D = 3, 6, 8
LENGTHS = np.array([3, 6, 4])
Weights, Given = Mapping[str, Any], Mapping[str, Any]
RECURRENT = {"w": (D, D), "u": (D, D), "b": (D,), "v": (D, D), "c": (D,), "o": (D, D)}


def _inputs(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(B, T, D)), "n": LENGTHS}


def _shown(given: Given) -> Any:
    return jnp.arange(T)[None] < given["n"][:, None]


def _all_steps(p: Weights, given: Given) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"] + p["b"] + h @ p["u"])
        return h, h

    _, states = jax.lax.scan(step, jnp.zeros((B, D)), jnp.swapaxes(given["x"], 0, 1))
    return jnp.swapaxes(states, 0, 1)


def _mean(p: Weights, given: Given) -> Any:
    h = jax.nn.relu(_all_steps(p, given) @ p["v"] + p["c"])
    return ((h * _shown(given)[..., None]).sum(1) / given["n"][:, None]) @ p["o"]


def _chosen(p: Weights, given: Given) -> Any:
    h = jax.nn.relu(_all_steps(p, given) @ p["v"] + p["c"])
    return jnp.where(_shown(given)[..., None], h @ p["o"], 0.0)


def _pooled(p: Weights, given: Given) -> Any:
    h = _all_steps(p, given)
    scores = jnp.tanh(h @ p["v"] + p["c"]) @ p["o"] + jnp.where(_shown(given), 0.0, -1e9)[..., None]
    return (jax.nn.softmax(scores, 1) * h).sum(1)


class Packed(nn.Module):
    """A recurrent layer over the steps of each sequence alone; ``off``: so many more are shown behind it, a planted fault."""

    def __init__(self, off: int) -> None:
        super().__init__()
        self.r, self.l, self.o = nn.RNN(D, D, batch_first=True), nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.off = off

    def both(self, x: Any, n: Any) -> tuple[Any, Any]:
        packed, _ = self.r(pack_padded_sequence(x, n.cpu(), batch_first=True, enforce_sorted=False))
        shown = torch.arange(T)[None] < n[:, None] + self.off
        return pad_packed_sequence(packed, batch_first=True, total_length=T)[0], shown[..., None]


class Mean(Packed):
    def forward(self, x: Any, n: Any) -> Any:
        h, shown = self.both(x, n)
        return self.o((torch.relu(self.l(h)) * shown).sum(1) / n[:, None])


class Chosen(Packed):
    def forward(self, x: Any, n: Any) -> Any:
        h, shown = self.both(x, n)
        return self.o(torch.relu(self.l(h))).masked_fill(~shown, 0.0)


class Pooled(Packed):
    def forward(self, x: Any, n: Any) -> Any:
        h, shown = self.both(x, n)
        scores = self.o(torch.tanh(self.l(h))).masked_fill(~shown, -torch.inf)
        return (scores.softmax(1) * h).sum(1)


PAIRS: dict[str, tuple[Callable[[Weights, Given], Any], type[Packed]]] = {
    "mean": (_mean, Mean),
    "chosen": (_chosen, Chosen),
    "pooled": (_pooled, Pooled),
}


def _derive(name: str, off: int = 0) -> Derivation:
    function, module = PAIRS[name]
    return infer(
        lambda p, given: {"y": function(p, given)},
        module(off).eval(),
        lambda net, given: {"y": net(**given)},
        _inputs,
        RECURRENT,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "pooled" else pytest.mark.slow) for name in PAIRS]
)
def test_rows_that_are_hidden_behind_a_recurrent_layer(name: str) -> None:
    found = _derive(name)
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}


@pytest.mark.slow
@pytest.mark.parametrize("off", [pytest.param(1), pytest.param(-1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "chosen" else pytest.mark.slow) for name in PAIRS]
)
def test_a_mask_of_other_rows_is_a_difference(name: str, off: int) -> None:
    found = _derive(name, off)
    assert not found.complete and found.differences
    assert Grade.DERIVED not in grades(found)


ATTENTION = {**dict.fromkeys("iqkvlo", (D, D)), "b": (D,), "c": (D,)}


def _attention(p: Weights, given: Given) -> Any:
    x = given["x"] @ p["i"] + p["b"]
    q, k, v = (x @ p[name] for name in "qkv")
    scores = jnp.where(_shown(given)[:, None], jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(D), -jnp.inf)
    x = x + jax.nn.relu(jax.nn.softmax(scores, -1) @ v @ p["l"] + p["c"])
    return (x * _shown(given)[..., None]).sum(1) @ p["o"]


class Attention(nn.Module):
    """Rows are zeros before the attention, whose scores get a large number added where the keys are hidden."""

    def __init__(self, off: int, mask: float = -1e4) -> None:
        super().__init__()
        self.i, self.l, self.off, self.mask = nn.Linear(D, D), nn.Linear(D, D), off, mask
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Any, n: Any) -> Any:
        shown, keys = (torch.arange(T)[None] < n[:, None] + off for off in (0, self.off))
        x = self.i(x) * shown[..., None]
        scores = self.q(x) @ self.k(x).mT / D**0.5 + torch.where(keys, 0.0, self.mask)[:, None]
        x = x + torch.relu(self.l(scores.softmax(-1) @ self.v(x)))
        return self.o((x * shown[..., None]).sum(1))


@pytest.mark.slow
@pytest.mark.parametrize("off", [0, 1, -1])
def test_rows_that_are_zeros_in_front_of_an_attention(off: int) -> None:
    found = infer(
        lambda p, given: {"y": _attention(p, given)},
        Attention(off).eval(),
        lambda net, given: {"y": net(**given)},
        _inputs,
        ATTENTION,
    )
    assert found.complete == (off == 0), found.differences


@pytest.mark.parametrize(("size", "mask"), [(1, -1e4), (1000, -torch.inf)])
def test_what_no_output_depends_on(size: float, mask: float) -> None:
    """The values of hidden keys, and queries and scores of hidden rows; zeros in their place change no output.

    Large activations are no masks, and the keys that a saturated softmax gives no weight are none that it hides.
    """
    module, given = Attention(0, mask), _inputs(0)
    given["x"] = size * given["x"]
    with few_threads(module):
        program = record_torch(module, lambda net, given: {"y": net(**given)}, given)
        hidden = hidden_elements(program)
        products = [operation for operation in program.operations if operation.name == "mm"]
        rows = {o.module: int(hidden[o.results[0]].sum()) // D for o in products if o.results[0] in hidden}
        assert rows == dict.fromkeys("iqkvl", B * T - int(LENGTHS.sum()))
        alone = shown_alone(program, hidden)
        again = rerun(alone, {k: v.array for k, v in program.parameters.items()}, given)
    np.testing.assert_allclose(again.outputs["y"].array, program.outputs["y"].array, rtol=1e-12)


def test_weights_decide_no_hidden_elements() -> None:
    """The zeros that a ReLU gives are others with other weights."""
    module = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    with few_threads(module):
        program = record_torch(module, lambda net, given: {"y": net(given["x"])}, {"x": _inputs(0)["x"]})
        assert not hidden_elements(program)


class AllNormed(nn.Module):
    """Layers that begin from zeros, with a norm and a head for the results of all, as DETR's decoder has them; one is given out."""

    def __init__(self, taken: int = -1, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.v, self.w = (nn.ModuleList(nn.Linear(D, D) for _ in range(3)) for _ in range(2))
        self.norm, self.head, self.taken = nn.LayerNorm(D, epsilon), nn.Linear(D, D), taken

    def forward(self, x: Any) -> Any:
        y, given = torch.zeros_like(x), []
        for v, w in zip(self.v, self.w, strict=True):
            y = y + w((v(y) + x).tanh())
            given.append(self.norm(y))
        return self.head(torch.stack(given))[self.taken]


def _last_normed(module: nn.Module) -> Derivation:
    leaves = ("w/0", "w/1", "w/2", "v/0", "v/1", "v/2", "head")
    shapes = {f"{name}/{of}": (D, D)[:rank] for name in leaves for rank, of in ((2, "kernel"), (1, "bias"))}

    def function(p: Weights, x: Any) -> Any:
        def layer(name: str, x: Any) -> Any:
            return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]

        y = jnp.zeros_like(x)
        for i in range(3):
            y = y + layer(f"w/{i}", jnp.tanh(layer(f"v/{i}", y) + x))
        return layer("head", layer_norm(y, p["scale"], p["shift"], 1e-5))

    return derive(function, module, {**shapes, "scale": (D,), "shift": (D,)}, floats(B, T, D))


@pytest.mark.slow
def test_results_that_no_output_takes() -> None:
    found = _last_normed(AllNormed())
    assert found.complete and grades(found) == {Grade.DERIVED, Grade.INTERCHANGEABLE}  # of what meets the zeros
    assert sources(found)["norm.weight"] == "scale"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [{"taken": -2}, {"epsilon": 1e-3}], ids=["taken", "epsilon"])
def test_a_fault_behind_results_that_no_output_takes(fault: dict[str, Any]) -> None:
    found = _last_normed(AllNormed(**fault))
    assert found.proof is None and found.differences
