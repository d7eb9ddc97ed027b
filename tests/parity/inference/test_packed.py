"""Sequences of several lengths in both directions: one program packs them, the other reverses each within its length, or holds the
state over the padding, so that the steps of one are not those of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, traverse_util
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import grades

B, T, D = 3, 5, 4
LENGTHS = np.array([5, 3, 4])
SLOW = pytest.mark.slow
ATTEND = ("attended", "target masks weights", "source masks weights")
LAYERS = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN, "relu": nn.RNN}
CELLS = {"gru": "GRUCell", "lstm": "LSTMCell", "rnn": "SimpleCell"}
GATES = {"gru": 3, "lstm": 4, "rnn": 1}
Function = Callable[[Mapping[str, Any], Any, Any], Any]  # (leaves, x, n) -> rows, and last states
Made = tuple[Function, Mapping[str, tuple[int, ...]]]


def _inputs(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(B, T, D)), "n": LENGTHS}


class Packed(nn.Module):
    """A layer in both directions over packed sequences; it gives the last states, the rows, or what attends to them.

    Args:
        fault: planted: `unpacked`, a `length` that is one less, directions that are `exchanged`, or another `divisor` of the weights.
    """

    def __init__(self, kind: str, gives: str, fault: str = "") -> None:
        super().__init__()
        relu = {"nonlinearity": "relu"} if kind == "relu" else {}
        self.r = LAYERS[kind](D, D, batch_first=True, bidirectional=True, **relu)
        self.gives, self.fault = gives, fault
        if gives in ATTEND:
            self.q, self.v = nn.Linear(3 * D, D, bias=False), nn.Linear(D, 1, bias=False)

    def forward(self, x: Any, n: Any) -> Any:
        if self.fault == "unpacked":
            rows, last = self.r(x)
            rows = rows * torch.arange(T)[None, :, None].lt(n[:, None, None])
        else:
            lengths = n - 1 if self.fault == "length" else n
            packed, last = self.r(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            rows, _ = pad_packed_sequence(packed, batch_first=True, total_length=T)
        last = last[0] if isinstance(last, tuple) else last
        if self.fault == "exchanged":
            rows, last = rows.roll(D, -1), last.flip(0)
        if self.gives not in ATTEND:
            return rows if self.gives == "rows" else last.transpose(0, 1).flatten(1)
        hidden = x[:, :1].expand(B, T, D)
        scores = self.v(torch.tanh(self.q(torch.cat([hidden, rows], -1))))
        padding = torch.arange(T)[None, :, None] >= n[:, None, None]
        if self.gives != "target masks weights":
            weights = scores.masked_fill(padding, -torch.inf).softmax(1)
        else:
            masked = scores.softmax(1) * ~padding
            weights = masked / (masked + padding if self.fault == "divisor" else masked).sum(1, keepdim=True)
        return (weights * rows).sum(1)


def _with_linen(kind: str) -> Made:
    """`nn.Bidirectional`, with the lengths."""

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any, n: Any) -> Any:
            ways = [linen.RNN(getattr(linen, CELLS[kind])(D), return_carry=True) for _ in range(2)]
            states, rows = linen.Bidirectional(*ways, return_carry=True)(x, seq_lengths=n)
            return rows, jnp.concatenate([state[1] if kind == "lstm" else state for state in states], -1)

    model = Model()
    tree = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((B, T, D)), LENGTHS)

    def function(leaves: Mapping[str, Any], x: Any, n: Any) -> Any:
        return model.apply(traverse_util.unflatten_dict(dict(leaves), sep="/"), x, n)

    return function, {name: leaf.shape for name, leaf in traverse_util.flatten_dict(tree, sep="/").items()}


def _with_haiku(kind: str) -> Made:
    """`hk.dynamic_unroll`, once over the sequences reversed within their lengths."""
    import haiku as hk

    def model(x: Any, n: Any) -> Any:
        found = []
        for move in (lambda x, n: x, _reversed_within):
            core = {"lstm": hk.LSTM, "relu": hk.VanillaRNN}[kind](D)
            rows, _ = hk.dynamic_unroll(core, move(x, n), core.initial_state(B), time_major=False)
            found.append((move(rows, n), jnp.take_along_axis(rows, n[:, None, None] - 1, 1)[:, 0]))
        return tuple(jnp.concatenate(each, -1) for each in zip(*found, strict=True))

    made = hk.without_apply_rng(hk.transform(model))
    tree = jax.eval_shape(made.init, jax.random.key(0), jnp.zeros((B, T, D)), LENGTHS)
    shapes = {f"{module}/{name}": leaf.shape for module, leaves in tree.items() for name, leaf in leaves.items()}

    def function(leaves: Mapping[str, Any], x: Any, n: Any) -> Any:
        modules: dict[str, dict[str, Any]] = {}
        for path, leaf in leaves.items():
            module, _, name = path.rpartition("/")
            modules.setdefault(module, {})[name] = leaf
        return made.apply(modules, x, n)

    return function, shapes


def _reversed_within(x: Any, n: Any) -> Any:
    at = jnp.arange(T)[None]
    return jnp.take_along_axis(x, jnp.where(at < n[:, None], n[:, None] - 1 - at, at)[..., None], 1)


def _step(kind: str, p: Mapping[str, Any], way: str, state: Any, x: Any) -> Any:
    given, h = x @ p[f"{way}/w"] + p[f"{way}/b"], state[..., :D]
    if kind == "gru":
        of_state = h @ p[f"{way}/u"] + p[f"{way}/c"]
        r, z = jnp.split(jax.nn.sigmoid(given + of_state)[..., : 2 * D], 2, -1)
        return (1 - z) * jnp.tanh(given[..., 2 * D :] + r * of_state[..., 2 * D :]) + z * h
    total = given + h @ p[f"{way}/u"]
    if kind == "rnn":
        return jnp.tanh(total)
    i, f, g, o = jnp.split(total, 4, -1)
    c = jax.nn.sigmoid(f) * state[..., D:] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jnp.concatenate([jax.nn.sigmoid(o) * jnp.tanh(c), c], -1)


def _by_hand(kind: str, style: str, fault: str = "") -> Made:
    """A scan that reverses each sequence within its length, or runs backwards and holds the state over the padding.

    Args:
        fault: planted: `stale`: the state moves on over padding; `whole`: sequences are reversed with their padding.
    """

    def function(p: Mapping[str, Any], x: Any, n: Any) -> Any:
        found = []
        for way in ("there", "back"):
            flip = way == "back" and style == "flips"

            def step(state: Any, now: Any, way: str = way) -> Any:
                given, t = now
                new = _step(kind, p, way, state, given)
                if fault != "stale":
                    new = jnp.where((t < n)[:, None], new, state)
                return new, new[..., :D]

            given = x[:, ::-1] if flip and fault == "whole" else _reversed_within(x, n) if flip else x
            first = jnp.zeros((B, 2 * D if kind == "lstm" else D))
            steps = jnp.swapaxes(given, 0, 1), jnp.arange(T)
            last, rows = jax.lax.scan(step, first, steps, reverse=way == "back" and not flip)
            rows = jnp.swapaxes(rows, 0, 1)
            found.append((_reversed_within(rows, n) if flip else rows, last[..., :D]))
        return tuple(jnp.concatenate(each, -1) for each in zip(*found, strict=True))

    width = GATES[kind] * D
    own = {"w": (D, width), "u": (D, width), "b": (width,), **({"c": (width,)} if kind == "gru" else {})}
    return function, {f"{way}/{name}": shape for way in ("there", "back") for name, shape in own.items()}


def _derive(made: Made, kind: str, gives: str, fault: str = "") -> Derivation:
    function, shapes = made
    if gives in ATTEND:
        shapes = {**shapes, "q": (D, D), "k": (2 * D, D), "v": (D, 1)}

    def whole(leaves: Mapping[str, Any], given: Any) -> Any:
        x, n = given["x"], given["n"]
        rows, last = function({name: leaf for name, leaf in leaves.items() if name not in ("q", "k", "v")}, x, n)
        shown = (jnp.arange(T)[None] < n[:, None])[..., None]
        if gives not in ATTEND:
            return {"y": jnp.where(shown, rows, 0.0) if gives == "rows" else last}
        scores = jnp.tanh((x[:, 0] @ leaves["q"])[:, None] + rows @ leaves["k"]) @ leaves["v"]
        if gives == "source masks weights":
            weights = jnp.where(shown, jax.nn.softmax(scores, 1), 0)
            return {"y": (weights / weights.sum(1, keepdims=True) * rows).sum(1)}
        return {"y": (jax.nn.softmax(jnp.where(shown, scores, -1e9), 1) * rows).sum(1)}

    module = Packed(kind, gives, fault).eval()
    return infer(whole, module, lambda net, given: {"y": net(**given)}, _inputs, shapes)


SOURCES: dict[str, Callable[[str], Made]] = {
    "linen": _with_linen,
    "haiku": _with_haiku,
    "flips": lambda kind: _by_hand(kind, "flips"),
    "held": lambda kind: _by_hand(kind, "held"),
}
CASES = [
    pytest.param(source, kind, gives, marks=() if (source, kind, gives) == ("linen", "gru", "rows") else SLOW)
    for source in SOURCES
    for kind in (("lstm", "relu") if source == "haiku" else CELLS)
    for gives in ("rows", "last", *ATTEND)
]


@pytest.mark.parametrize(("source", "kind", "gives"), CASES)
def test_packed_sequences_in_both_directions(source: str, kind: str, gives: str) -> None:
    found = _derive(SOURCES[source](kind), kind, gives)
    assert found.complete, found.differences
    assert grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}  # either of torch's two biases


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["length", pytest.param("unpacked", marks=SLOW), pytest.param("exchanged", marks=SLOW)]
)
@pytest.mark.parametrize(
    ("source", "kind"), [("held", "rnn"), *[pytest.param(x, k, marks=SLOW) for x in ("linen", "flips") for k in CELLS]]
)
def test_other_lengths_or_directions_are_never_derived(source: str, kind: str, fault: str) -> None:
    found = _derive(SOURCES[source](kind), kind, "rows" if fault == "exchanged" else "last", fault)
    assert not found.complete and found.proof is None and found.differences


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["length", "divisor"])
def test_weights_of_another_mask_or_sum_are_never_derived(fault: str) -> None:
    found = _derive(_with_linen("gru"), "gru", "target masks weights", fault)
    assert not found.complete and found.proof is None and found.differences


@pytest.mark.slow
@pytest.mark.parametrize(("style", "fault"), [("flips", "whole"), ("flips", "stale"), ("held", "stale")])
@pytest.mark.parametrize("kind", CELLS)
def test_states_that_run_over_the_padding_are_never_derived(kind: str, style: str, fault: str) -> None:
    found = _derive(_by_hand(kind, style, fault), kind, "last")
    assert not found.complete and found.proof is None and found.differences


class Encoder(nn.Module):
    """Two packed layers in both directions, and a layer of their last states, with rows of a table added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.r = nn.GRU(2 * D, D, num_layers=2, batch_first=True, bidirectional=True)
        self.out, self.table = nn.Linear(2 * D, 3), nn.Embedding(9, 3)

    def forward(self, x: Any, n: Any, words: Any, word: Any) -> Any:
        _, last = self.r(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False))
        return (self.out(torch.cat([last[-2], last[-1]], 1)) + self.table(words).sum(1) * self.table(word)).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(7, 5, 7, 7), (7, 4, 5, 3)])
def test_states_of_sequences_that_ended_are_no_batch(lengths: tuple[int, ...]) -> None:
    """They are joined with those of the others, which are computed from an earlier step."""
    n = np.array(lengths)

    class Layers(linen.Module):
        @linen.compact
        def __call__(self, x: Any, n: Any, words: Any, word: Any) -> Any:
            for _ in range(2):
                ways = (linen.RNN(linen.GRUCell(D)) for _ in range(2))
                states, x = linen.Bidirectional(*ways, return_carry=True)(x, seq_lengths=n)
            table = linen.Embed(9, 3)
            return jnp.tanh(linen.Dense(3)(jnp.concatenate(states, -1)) + table(words).sum(1) * table(word))

    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        words, word = rng.integers(0, 9, (4, 3)), rng.integers(0, 9, 4)  # as many as the states of either set of rows
        return {"x": rng.normal(size=(4, 7, 2 * D)), "n": n, "words": words, "word": word}

    model = Layers()
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs(0).values())
    paths, tree = jax.tree_util.tree_flatten_with_path(shapes)
    names = [jax.tree_util.keystr(path) for path, _ in paths]

    def function(leaves: Mapping[str, Any], given: Any) -> Any:
        variables = jax.tree_util.tree_unflatten(tree, [leaves[name] for name in names])
        return {"y": model.apply(variables, *(given[name] for name in ("x", "n", "words", "word")))}

    sizes = {name: leaf.shape for name, (_, leaf) in zip(names, paths, strict=True)}
    found = infer(function, Encoder().eval(), lambda net, given: {"y": net(**given)}, inputs, sizes)
    assert found.complete, found.differences
