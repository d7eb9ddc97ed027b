"""*Interchangeable* exactly where it is true: tensors of symmetric models are, those of nearly symmetric ones are derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional as f

from convert.inference.derivation import Grade
from convert.inference.infer import infer
from support.inferred import WIDTH, derive, floats, rms_norm, tokens

D, V, T = WIDTH, 11, 7
SQUARE, ROW, TABLE, STACK, PLACES = (D, D), (D,), (V, D), (2, D, D), (T + 1, D)
SHAPE_OF = (
    dict.fromkeys("abcdfho", SQUARE)
    | dict.fromkeys("stu", ROW)
    | dict.fromkeys("eg", TABLE)
    | dict.fromkeys("kl", STACK)
    | dict.fromkeys("pq", PLACES)
    | {"r": (D, 3)}
)
Function = Callable[[Mapping[str, Any], Any, Any], Any]


class Net(torch.nn.Module):
    """Computes a case with parameters in the other order of names, laid out as PyTorch has them."""

    def __init__(self, case: Function, names: str) -> None:
        super().__init__()
        self.case, self.order = case, dict(zip(names, _turned(names), strict=True))
        for name in names:
            self.register_parameter(f"p_{name}", torch.nn.Parameter(torch.randn(SHAPE_OF[name])))

    def forward(self, x: Any) -> Any:
        own = {name: getattr(self, f"p_{self.order[name]}") for name in self.order}
        own = {name: value.T if value.shape == SQUARE else value for name, value in own.items()}
        return self.case(own, x, TORCH)


def _turned(names: str) -> str:
    """Pairs of names of one shape change places, so that the first leaf is not the first parameter."""
    found = list(names)
    for shape in (SQUARE, ROW, TABLE, STACK, PLACES):
        at = [k for k, name in enumerate(names) if SHAPE_OF[name] == shape]
        for k, other in zip(at, reversed(at), strict=True):
            found[k] = names[other]
    return "".join(found)


class Jax:
    """What a case calls, in JAX."""

    tanh, sin, exp, abs, maximum, minimum, relu = (
        jnp.tanh,
        jnp.sin,
        jnp.exp,
        jnp.abs,
        jnp.maximum,
        jnp.minimum,
        jax.nn.relu,
    )
    silu, sigmoid, where, softmax, logsumexp, concat = (
        jax.nn.silu,
        jax.nn.sigmoid,
        jnp.where,
        jax.nn.softmax,
        jnp.logaddexp,
        jnp.concatenate,
    )
    broadcast = jnp.broadcast_to

    @staticmethod
    def norm(x: Any, scale: Any, epsilon: float = 1e-6) -> Any:
        return rms_norm(x, scale, epsilon)

    @staticmethod
    def gelu(x: Any) -> Any:
        return jax.nn.gelu(x, approximate=True)


class Torch:
    """What a case calls, in PyTorch."""

    tanh, sin, exp, abs, maximum, minimum, relu = (
        torch.tanh,
        torch.sin,
        torch.exp,
        torch.abs,
        torch.maximum,
        torch.minimum,
        f.relu,
    )
    silu, sigmoid, where, logsumexp, concat = f.silu, torch.sigmoid, torch.where, torch.logaddexp, torch.cat
    broadcast = torch.broadcast_to

    @staticmethod
    def softmax(x: Any) -> Any:
        return x.softmax(-1)

    @staticmethod
    def norm(x: Any, scale: Any, epsilon: float = 1e-6) -> Any:
        return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * scale

    @staticmethod
    def gelu(x: Any) -> Any:
        return f.gelu(x, approximate="tanh")


TORCH = Torch
HALF = {Jax: np.arange(D) % 2 * 1.0, Torch: torch.arange(D) % 2 * 1.0}


def _causal(scores: Any, m: Any) -> Any:
    mask = np.tri(T, dtype=bool)
    return m.softmax(m.where(torch.as_tensor(mask) if m is TORCH else mask, scores, -1e30))


SYMMETRIC: dict[str, tuple[str, str, Function]] = {  # parameters, those that are interchangeable
    "two branches": ("abo", "ab", lambda w, x, m: (m.tanh(x @ w["a"]) + m.tanh(x @ w["b"])) @ w["o"]),
    "three branches": ("abco", "abc", lambda w, x, m: (m.tanh(x @ w["a"]) + m.tanh(x @ w["b"]) + m.tanh(x @ w["c"])) @ w["o"]),
    "two sums in one function": ("abo", "ab", lambda w, x, m: m.tanh(x @ w["a"] + x @ w["b"]) @ w["o"]),
    "a product of two": ("abo", "ab", lambda w, x, m: (m.tanh(x @ w["a"]) * m.tanh(x @ w["b"])) @ w["o"]),
    "a product of two lines": ("abo", "ab", lambda w, x, m: ((x @ w["a"]) * (x @ w["b"])) @ w["o"]),
    "branches with biases": ("abosu", "absu", lambda w, x, m: (m.tanh(x @ w["a"] + w["s"]) + m.tanh(x @ w["b"] + w["u"])) @ w["o"]),
    "the larger of two": ("abo", "ab", lambda w, x, m: m.maximum(x @ w["a"], x @ w["b"]) @ w["o"]),
    "the smaller of two": ("abo", "ab", lambda w, x, m: m.minimum(x @ w["a"], x @ w["b"]) @ w["o"]),
    "two equal experts": ("abcdo", "abcd", lambda w, x, m: ((m.silu(x @ w["a"]) @ w["b"] + m.silu(x @ w["c"]) @ w["d"]) / 2) @ w["o"]),
    "two gates": ("abo", "ab", lambda w, x, m: (x * m.sigmoid(x @ w["a"]) * m.sigmoid(x @ w["b"])) @ w["o"]),
    "a distance": ("abo", "ab", lambda w, x, m: m.abs(x @ w["a"] - x @ w["b"]) @ w["o"]),
    "a squared difference": ("abo", "ab", lambda w, x, m: ((x @ w["a"] - x @ w["b"]) ** 2) @ w["o"]),
    "the logarithm of two exponentials": ("abo", "ab", lambda w, x, m: m.logsumexp(x @ w["a"], x @ w["b"]) @ w["o"]),
    "a softmax of a sum": ("abo", "ab", lambda w, x, m: m.softmax(x @ w["a"] + x @ w["b"]) @ w["o"]),
    "scores of both orders": ("abo", "ab", lambda w, x, m: m.softmax((x @ w["a"]) @ (x @ w["b"]).swapaxes(1, 2) + (x @ w["b"]) @ (x @ w["a"]).swapaxes(1, 2)) @ (x @ w["o"])),
    "two tables of the tokens": ("ego", "eg", lambda w, x, m: m.tanh(w["e"][x] + w["g"][x]) @ w["o"]),
    "a product of two tables": ("ego", "eg", lambda w, x, m: (w["e"][x] * w["g"][x]) @ w["o"]),
    "two functions of two tables": ("ego", "eg", lambda w, x, m: (m.tanh(w["e"][x]) + m.tanh(w["g"][x])) @ w["o"]),
    "two norms": ("sto", "st", lambda w, x, m: m.tanh(m.norm(x, w["s"])) @ w["o"] + m.tanh(m.norm(x, w["t"])) @ w["o"]),
    "deep branches": ("abcdo", "abcd", lambda w, x, m: (m.tanh(m.sin(x @ w["a"]) @ w["b"]) + m.tanh(m.sin(x @ w["c"]) @ w["d"])) @ w["o"]),
    "two layers of branches": ("abcdo", "abcd", lambda w, x, m: _layer(w, _layer(w, x, m, "ab"), m, "cd") @ w["o"]),
    "two heads": ("abcdo", "abcd", lambda w, x, m: (m.softmax(x @ w["a"]) * (x @ w["b"]) + m.softmax(x @ w["c"]) * (x @ w["d"])) @ w["o"]),
    "two biases": ("asto", "st", lambda w, x, m: m.tanh(x @ w["a"] + w["s"] + w["t"]) @ w["o"]),
    "two scales": ("asto", "st", lambda w, x, m: m.tanh((x @ w["a"]) * w["s"] * w["t"]) @ w["o"]),
    "a stack of two": ("ko", "k", lambda w, x, m: (m.tanh(x @ w["k"][0]) + m.tanh(x @ w["k"][1])) @ w["o"]),
    "a sum of three": ("abc", "abc", lambda w, x, m: m.tanh(x @ w["a"]) + m.tanh(x @ w["b"]) + m.tanh(x @ w["c"])),
    "a product of three": ("abco", "abc", lambda w, x, m: (m.tanh(x @ w["a"]) * m.tanh(x @ w["b"]) * m.tanh(x @ w["c"])) @ w["o"]),
    "the largest of three": ("abc", "abc", lambda w, x, m: m.maximum(m.maximum(x @ w["a"], x @ w["b"]), x @ w["c"])),
    "a sum of a difference": ("abco", "bc", lambda w, x, m: (m.tanh(x @ w["a"]) - m.tanh(x @ w["b"]) - m.tanh(x @ w["c"])) @ w["o"]),
    "two of three": ("abc", "ac", lambda w, x, m: x @ w["a"] + m.tanh(x) @ w["b"] + x @ w["c"]),
    "three experts beside the data": ("abcdfh", "abcdfh", lambda w, x, m: x + m.tanh(x @ w["a"]) @ w["b"] + m.tanh(x @ w["c"]) @ w["d"] + m.tanh(x @ w["f"]) @ w["h"]),
    "matrices that are added": ("abo", "ab", lambda w, x, m: m.tanh(x @ (w["a"] + w["b"])) @ w["o"]),
    "matrices that are multiplied": ("abo", "ab", lambda w, x, m: m.tanh(x @ (w["a"] * w["b"])) @ w["o"]),
    "scales that are added": ("sto", "st", lambda w, x, m: m.tanh(x * (w["s"] + w["t"])) @ w["o"]),
    "a matrix and its transpose": ("ao", "a", lambda w, x, m: m.tanh(x @ (w["a"] + w["a"].T)) @ w["o"]),
    "a quadratic form": ("a", "a", lambda w, x, m: ((x @ w["a"]) * x).sum(-1)),
    "no part of the output": ("ab", "a", lambda w, x, m: 0 * (x @ w["a"]) + x @ w["b"]),
    "masks in front and behind": ("abs", "abs", lambda w, x, m: x + m.tanh((x * HALF[m]) @ w["a"]) @ w["b"] * w["s"] * (1 - HALF[m])),
    "parts of each": ("abo", "ab", lambda w, x, m: m.tanh(m.concat([x @ w["a"], x @ w["b"]], -1))[..., 3 : 3 + D] @ w["o"]),
    "a class token and its position": ("spo", "sp", lambda w, x, m: m.tanh(_with_token(w["s"], x, m) + w["p"]) @ w["o"]),
    "a class token and its two positions": ("spqo", "spq", lambda w, x, m: m.tanh(_with_token(w["s"], x, m) + w["p"] + w["q"]) @ w["o"]),
    "a class token and its scale": ("spo", "sp", lambda w, x, m: m.tanh(_with_token(w["s"], x, m) * w["p"]) @ w["o"]),
    "experts and their gates": ("abcro", "abcr", lambda w, x, m: _gated(w, x, m, m.softmax) @ w["o"]),
    "experts and their sigmoids": ("abcro", "abcr", lambda w, x, m: _gated(w, x, m, m.sigmoid) @ w["o"]),
    "two stacks of experts": ("klo", "kl", lambda w, x, m: (m.silu(x @ w["k"][0]) @ w["l"][0] + m.silu(x @ w["k"][1]) @ w["l"][1]) @ w["o"]),
}  # fmt: skip

NEARLY: dict[str, tuple[str, Function]] = {
    "another function": ("abo", lambda w, x, m: (m.tanh(x @ w["a"]) + m.sin(x @ w["b"])) @ w["o"]),
    "another factor": ("abo", lambda w, x, m: (m.tanh(x @ w["a"]) + 1.01 * m.tanh(x @ w["b"])) @ w["o"]),
    "a difference": ("abo", lambda w, x, m: (m.sin(m.tanh(x @ w["a"]) ** 2 - m.tanh(x @ w["b"]) ** 2)) @ w["o"]),
    "a gate": ("abo", lambda w, x, m: (m.silu(x @ w["a"]) * (x @ w["b"])) @ w["o"]),
    "side by side": ("abo", lambda w, x, m: _turned_by_three(m.tanh(m.concat([x @ w["a"], x @ w["b"]], -1)), m) @ w["o"]),
    "a bias in one": ("abos", lambda w, x, m: m.maximum(x @ w["a"] + w["s"], x @ w["b"]) @ w["o"]),
    "unequal experts": ("abcdo", lambda w, x, m: (0.6 * m.gelu(x @ w["a"]) @ w["b"] + 0.4 * m.silu(x @ w["c"]) @ w["d"]) @ w["o"]),
    "queries and keys under a mask": ("abo", lambda w, x, m: _causal((x @ w["a"]) @ (x @ w["b"]).swapaxes(1, 2), m) @ (x @ w["o"])),
    "a table of other tokens": ("ego", lambda w, x, m: m.tanh(w["e"][x] + w["g"][(x + 1) % V]) @ w["o"]),
    "one deeper": ("abo", lambda w, x, m: (m.tanh(x @ w["a"]) + m.tanh(m.tanh(x @ w["b"]))) @ w["o"]),
    "another epsilon": ("sto", lambda w, x, m: m.tanh(m.norm(x, w["s"])) @ w["o"] + m.tanh(m.norm(x, w["t"], 1e-2)) @ w["o"]),
    "one of them passes on": ("abo", lambda w, x, m: m.tanh(x @ w["a"]) * m.tanh(x @ w["b"]) + m.sin(x @ w["a"]) @ w["o"]),
    "relu and leaky relu": ("abo", lambda w, x, m: (m.relu(x @ w["a"]) + m.maximum(x @ w["b"], 0.01 * (x @ w["b"]))) @ w["o"]),
    "a stack with weights": ("ko", lambda w, x, m: (m.tanh(x @ w["k"][0]) + 0.9 * m.tanh(x @ w["k"][1])) @ w["o"]),
    "a sum of three with another factor": ("abco", lambda w, x, m: (m.tanh(x @ w["a"]) + 1.01 * m.tanh(x @ w["b"]) + 0.99 * m.tanh(x @ w["c"])) @ w["o"]),
    "used again": ("abco", lambda w, x, m: (m.tanh(x @ w["a"]) + m.tanh(x @ w["b"]) + m.tanh(m.sin(x @ w["a"]) @ w["c"])) @ w["o"]),
    "a class token in front of its positions": ("spo", lambda w, x, m: m.tanh(m.sin(_with_token(w["s"], x, m)) + w["p"]) @ w["o"]),
    "positions that are used again": ("spo", lambda w, x, m: (m.tanh(_with_token(w["s"], x, m) + w["p"]) + m.sin(w["p"])) @ w["o"]),
    "positions that are taken away": ("spo", lambda w, x, m: m.tanh(_with_token(w["s"], x, m) - w["p"]) @ w["o"]),
    "experts of other functions": ("abcro", lambda w, x, m: _gated(w, x, m, m.softmax, (m.tanh, m.sin, m.exp)) @ w["o"]),
    "gates that are used again": ("abcro", lambda w, x, m: _gated(w, x, m, m.softmax) @ w["o"] * m.sigmoid(x @ w["r"])[..., :1] * m.tanh(x @ w["r"])[..., 1:2] * m.sin(x @ w["r"])[..., 2:]),
    "the product of two": ("abo", lambda w, x, m: m.tanh((x @ w["a"]) @ w["b"]) @ w["o"]),
    "a bilinear form of two": ("ao", lambda w, x, m: ((x @ w["a"]) * m.tanh(x)).sum(-1, keepdims=True) * (x @ w["o"])),
    "scores of itself": ("ao", lambda w, x, m: m.softmax((x @ w["a"]) @ x.swapaxes(1, 2)) @ (x @ w["o"])),
    "queries and keys": ("abo", lambda w, x, m: m.softmax((x @ w["a"]) @ (x @ w["b"]).swapaxes(1, 2)) @ (x @ w["o"])),
}  # fmt: skip


def _gated(w: Any, x: Any, m: Any, gate: Any, functions: Any = None) -> Any:
    """Three experts, each with a column of the gate."""
    gates = gate(x @ w["r"])
    parts = zip("abc", functions or (m.tanh,) * 3, strict=True)
    one, two, three = (gates[..., k, None] * f(x @ w[name]) for k, (name, f) in enumerate(parts))
    return one + two + three


def _with_token(token: Any, x: Any, m: Any) -> Any:
    return m.concat([m.broadcast(token, (len(x), 1, D)), x], 1)


def _turned_by_three(x: Any, m: Any) -> Any:
    return x[..., 3 : 3 + D] + 2 * m.concat([x[..., 3 + D :], x[..., :3]], -1)


def _layer(w: Any, x: Any, m: Any, names: str) -> Any:
    one, two = names
    return x + m.tanh(x @ w[one]) + m.tanh(x @ w[two])


def _derived(names: str, case: Function) -> tuple[Any, dict[str, str]]:
    shapes = {name: SHAPE_OF[name] for name in names}
    inputs = tokens(V, 6, T) if "e" in names else floats(3, T, D)
    net = Net(case, names)
    found = derive(lambda w, x: case(w, x, Jax), net, shapes, inputs)
    return found, {f"p_{ours}": leaf for leaf, ours in net.order.items()}


QUICK = ("two branches", "a sum of three", "masks in front and behind", "two tables of the tokens", "another factor")


def _cases(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", _cases(SYMMETRIC))
def test_symmetric_tensors_are_interchangeable_and_no_others(name: str) -> None:
    names, symmetric, case = SYMMETRIC[name]
    found, leaves = _derived(names, case)
    assert found.complete, found.differences
    grades = {leaves[tensor.name]: tensor.grade for tensor in found.tensors}
    assert grades == {leaf: Grade.INTERCHANGEABLE if leaf in symmetric else Grade.DERIVED for leaf in names}
    for tensor in found.tensors:
        assert bool(tensor.alternatives or tensor.unseen) is (leaves[tensor.name] in symmetric)


@pytest.mark.parametrize("name", _cases(NEARLY))
def test_nearly_symmetric_tensors_are_derived(name: str) -> None:
    names, case = NEARLY[name]
    found, leaves = _derived(names, case)
    assert found.complete, found.differences
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
    assert {tensor.name: {part.leaf for part in tensor.parts} for tensor in found.tensors} == {
        ours: {leaf} for ours, leaf in leaves.items()
    }


@pytest.mark.slow
def test_branches_of_one_leaf_are_derived() -> None:
    """Both tensors are the same leaf: to exchange them changes nothing, and there is no other way."""

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return torch.tanh(self.m[0](x)) + torch.tanh(self.m[1](x)) + torch.sin(self.m[2](x))

    found = derive(lambda w, x: 2 * jnp.tanh(x @ w["a"]) + jnp.sin(x @ w["b"]), Branches(), {"a": (D, D), "b": (D, D)})
    assert {t.name: t.parts[0].leaf for t in found.tensors} == {"m.0.weight": "a", "m.1.weight": "a", "m.2.weight": "b"}
    assert found.complete and {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}


@pytest.mark.slow
def test_branches_that_the_outputs_alone_show() -> None:
    """The source multiplies two leaves before data meets them, and shares no value with the target behind the first one."""
    rank, names = 8, ("a", "b", "c")

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = (torch.nn.ModuleList() for _ in range(2))
            for _ in names:
                self.down.append(torch.nn.Linear(D, rank, bias=False))
                self.up.append(torch.nn.Linear(rank, D, bias=False))

        def forward(self, x: Any) -> Any:
            return sum(torch.tanh(up(down(x))) for down, up in zip(self.down, self.up, strict=True))

    def function(w: Any, x: Any) -> Any:
        return sum(jnp.tanh(x @ (w[f"{name}/down"] @ w[f"{name}/up"])) for name in names)

    shapes = {f"{name}/{side}": of for name in names for side, of in (("down", (D, rank)), ("up", (rank, D)))}
    found = derive(function, Branches(), shapes)
    assert found.complete, found.differences
    assert {(tensor.grade, bool(tensor.alternatives)) for tensor in found.tensors} == {(Grade.INTERCHANGEABLE, True)}


def test_branches_that_one_draw_makes_symmetric() -> None:
    """The share of two branches is a half in the first draw: with it they may change places, and with the others they may not."""

    def case(w: Any, x: Any, m: Any) -> Any:
        return (w["share"] * m.tanh(x @ w["a"]) + (1 - w["share"]) * m.tanh(x @ w["b"])) @ w["o"]

    def given(seed: int) -> dict[str, Any]:
        return floats(3, T, D)(seed) | {"share": np.float64(0.5 if seed == 0 else 0.2 + 0.1 * seed)}

    class Two(Net):
        def forward(self, x: Any) -> Any:  # the names of the parameters are those of the leaves
            own = {name: getattr(self, f"p_{self.order[name]}").T for name in self.order}
            return case(own | {"share": x["share"]}, x["x"], TORCH)

    for names in ("abo", "bao"):  # the first solution is the right one of one of them
        net = Two(case, names)
        found = infer(
            lambda w, i: {"y": case(w | {"share": i["share"]}, i["x"], Jax)},
            net,
            lambda net, i: {"y": net(i)},
            given,
            dict.fromkeys(names, SQUARE),
        )
        assert found.complete, found.differences
        assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
        assert {t.name: t.parts[0].leaf for t in found.tensors} == {
            f"p_{ours}": leaf for leaf, ours in net.order.items()
        }
