"""Where the programs differ, what was found is graded by what it rests on, and each grade is refuted by a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.cli.infer_text import summary
from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from convert.inference.rule_file.write import write_rules
from convert.rules.parse import parse_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive, floats, grades, sources

Function = Callable[[Any], Any]
SHAPES = dict.fromkeys(("a", "b", "c", "d"), (WIDTH, WIDTH))
PARTS = (3, 2, 2)


class Trunk(torch.nn.Module):
    """Two layers, and two outputs of their result."""

    def __init__(self, first: Function = torch.tanh, second: Function = torch.tanh) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.first, self.second = first, second

    def forward(self, x: Any) -> dict[str, Any]:
        x = self.first(self.a(x))
        y = self.second(self.b(x))
        return {"one": self.c(y), "two": self.d(x)}


def _trunk(first: Function, w: Any, x: Any) -> dict[str, Any]:
    x = first(x["x"] @ w["a"])
    y = jnp.tanh(x @ w["b"])
    return {"one": y @ w["c"], "two": x @ w["d"]}


def _of_trunk(module: Trunk, first: Function = jnp.tanh) -> Derivation:
    return infer(
        lambda w, x: _trunk(first, w, x), module, lambda module, given: module(given["x"]), floats(3, 7, WIDTH), SHAPES
    )


def test_in_front_behind_and_beside_a_difference() -> None:
    found = _of_trunk(Trunk(second=torch.sigmoid))
    assert not found.complete and found.proof is None and found.differences
    assert {tensor.name: tensor.grade for tensor in found.tensors} == {
        "a.weight": Grade.IN_FRONT,
        "b.weight": Grade.IN_FRONT,
        "c.weight": Grade.BEHIND,
        "d.weight": Grade.IN_FRONT,
    }
    assert sources(found) == {"a.weight": "a", "b.weight": "b", "c.weight": "c", "d.weight": "d"}
    text = write_rules(found, model_of_module(Trunk(), "Model")).text
    assert (
        "# derived up to the mismatch: dot_general" in text
        and "# derived up to the mismatch or found behind the mismatch: " in text
    )  # of a and b, and of c and d
    assert "# derived: " not in text and "ask" not in text
    (note,) = parse_rules(text).targets["torch"].differs
    assert note.startswith("the two programs differ at test_up_to_the_difference.py:") and "sigmoid" in note


def test_a_small_fault_in_front_leaves_nothing_behind_it_derived() -> None:
    """It is below the tolerance of the search; fresh draws are compared to the rounding of float64."""
    module = Trunk(lambda x: torch.tanh(x) * (1 + 1e-8), torch.sigmoid)
    found = {tensor.name: tensor.grade for tensor in _of_trunk(module).tensors}
    assert found.pop("a.weight") is Grade.IN_FRONT, "its product is the source's"
    assert set(found.values()) <= {Grade.BEHIND, Grade.OPEN}
    same = {tensor.name: tensor.grade for tensor in _of_trunk(Trunk(second=torch.sigmoid)).tensors}
    assert same["d.weight"] is Grade.IN_FRONT


class Branched(Trunk):
    """Its values choose a branch, in which x is multiplied."""

    def __init__(self, above: float, factor: float) -> None:
        super().__init__(second=torch.sigmoid)
        self.above, self.factor = above, factor

    def forward(self, x: Any) -> dict[str, Any]:
        return super().forward(x * self.factor if (x > self.above).any() else x)


def test_a_branch_that_further_inputs_take_too_leaves_nothing_open() -> None:
    found, plain = (_of_trunk(module) for module in (Branched(0.0, 1.0), Trunk(second=torch.sigmoid)))
    assert found.differences[0].shown and not found.complete
    assert [tensor.grade for tensor in found.tensors] == [tensor.grade for tensor in plain.tensors]


def test_a_branch_that_one_of_the_further_inputs_takes_derives_nothing() -> None:
    """The first inputs take the other one."""
    first, *largest = [floats(3, 7, WIDTH)(seed)["x"].max() for seed in range(4)]
    above = float(np.sort([first, *largest])[-2])
    assert first <= above < max(largest)
    assert grades(_of_trunk(Branched(above, 1.5))) == {Grade.OPEN}


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.c(torch.sin(self.a(x)) * torch.sigmoid(self.b(x)))


@pytest.mark.slow
def test_what_nothing_in_front_of_the_difference_tells_apart_is_open() -> None:
    """Each of both leaves gives a value of the source; what tells them apart is where the programs differ."""
    found = derive(
        lambda w, x: (jnp.tanh(x @ w["a"]) * jnp.exp(x @ w["b"])) @ w["c"],
        Two(),
        dict.fromkeys("abc", (WIDTH, WIDTH)),
    )
    for name in ("a.weight", "b.weight"):
        tensor = found.tensor(name)
        assert tensor.grade is Grade.OPEN and tensor.candidates == ("a", "b")
    assert found.tensor("c.weight").grade in (Grade.BEHIND, Grade.OPEN)


class OfEachHead(torch.nn.Module):
    """A query layer and a key layer for each of three heads, and one value layer; what is done with them is not what the source does."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (torch.nn.ModuleList(torch.nn.Linear(WIDTH, 5) for _ in range(3)) for _ in "qk")
        self.v = torch.nn.Linear(WIDTH, 5)

    def forward(self, x: Any) -> Any:
        heads = zip(self.q, self.k, strict=True)
        return sum(torch.cos(q(x) @ k(x).transpose(1, 2)) @ self.v(x) for q, k in heads)


@pytest.mark.slow
def test_a_leaf_of_which_one_part_is_a_layer_is_not_refuted_by_its_whole_value() -> None:
    """Any layer gives a value of the source where it is taken for the value's: the queries of one head are a part of one."""

    def function(w: Any, x: Any) -> Any:
        q, k = (jnp.einsum("btd,dhf->bthf", x, w[name]) + w[f"{name}_b"] for name in "qk")
        scores = jnp.einsum("bqhf,bkhf->bhqk", q, k)
        return jnp.tanh(scores * jnp.abs(scores)).mean(1) @ (x @ w["v"] + w["v_b"])

    heads = dict.fromkeys("qk", (WIDTH, 3, 5)) | {f"{name}_b": (3, 5) for name in "qk"}
    found = derive(function, OfEachHead(), {**heads, "v": (WIDTH, 5), "v_b": (5,)})
    assert found.differences and not found.complete
    assert {tensor.grade for tensor in found.tensors} == {Grade.OPEN}
    assert set(found.tensor("q.0.weight").candidates) >= {"q", "k", "v"}


class Mixed(torch.nn.Module):
    """Two layers, each behind a scale of its own; what follows is not what the source computes."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = (torch.nn.Parameter(torch.zeros(WIDTH)) for _ in "kv")
        self.key, self.value = (torch.nn.Linear(WIDTH, 7, bias=False) for _ in "kv")

    def forward(self, x: Any) -> Any:
        return torch.cos(self.key(x * self.k)) * self.value(x * self.v)


def test_a_layer_behind_a_scale_that_is_open_is_open_too() -> None:
    """The scale of either layer fits, and the layer fits what was chosen: it was said to be derived, of the wrong leaf by chance."""
    found = derive(
        lambda w, x: jnp.sin((x * w["a"]) @ w["one"]) * ((x * w["b"]) @ w["two"]),
        Mixed(),
        {**dict.fromkeys("ab", (WIDTH,)), **dict.fromkeys(("one", "two"), (WIDTH, 7))},
    )
    assert grades(found) == {Grade.OPEN}
    said = list(summary(found, {}))
    assert "open: k: may be made of any of 2 leaves of its size, which nothing tells apart so far: a, b" in said
    assert "open: key.weight: may be made of one; the search ended before it was proven" in said


class Gated(torch.nn.Module):
    """Layers with a gate each, in which the search ends: the source computes nothing like its cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1, WIDTH)) for _ in range(2)])
        self.last = torch.nn.Linear(WIDTH, 7, bias=False)

    def forward(self, x: Any) -> Any:
        for gate in self.gates:
            x = torch.tanh(x + torch.cos(gate) * x.cumsum(1))
        return self.last(x)


def test_one_part_of_a_stack_is_a_candidate_and_rows_of_a_table_are_none() -> None:
    """Whole leaves alone were candidates, so that it was said that nothing fits."""

    def source(w: Any, x: Any) -> Any:
        for k in range(2):
            x = jnp.tanh(x * jnp.exp(jnp.sin(x) @ jnp.diag(w["stack"][k]) + w["table"].sum()))
        return x @ w["v"]

    found = derive(source, Gated(), {"stack": (2, WIDTH), "v": (WIDTH, 7), "table": (32, WIDTH)})
    gate = found.tensor("gates.0")
    assert gate.grade is Grade.OPEN and gate.candidates == ("stack",)
    assert "open: gates.0 and 1 more like it: may be made of one part of axis 0 of stack" in list(summary(found, {}))


@pytest.mark.slow
def test_a_norm_that_is_missing_gives_its_scale_to_no_other() -> None:
    """Between two values that were given, a scale fits that of the layer that is missing."""
    from support.planted import attention

    torch.manual_seed(0)
    pair = attention.PAIRS["decoder"]
    found = derive(pair.function, pair.module("no second norm"), pair.shapes, pair.inputs)
    right = derive(pair.function, pair.module(""), pair.shapes, pair.inputs)
    for tensor in found.tensors:
        if tensor.grade is not Grade.OPEN:
            ours, theirs = (sources(one.tensor(tensor.name)) for one in (found, right))
            assert ours == theirs, tensor.name
    assert grades(found) == {Grade.IN_FRONT, Grade.BEHIND, Grade.OPEN}


class Fields(torch.nn.Module):
    """Every number of x scales an embedding of its own, so that all of its elements meet one number."""

    def __init__(self, first: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first = first
        self.number = torch.nn.Parameter(torch.zeros(3, 4))
        self.mix = torch.nn.Linear(3, 4)
        self.one, self.two = torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.two(self.one(self.first(x[..., None] * self.number, self.mix(x))).sigmoid())


FIELDS = {"n": (3, 4), "m": (3, 4), "mb": (4,), "o": (4, 6), "ob": (6,), "t": (6, 2), "tb": (2,)}


def of_fields(first: Callable[[Any, Any], Any], of_torch: Callable[[Any, Any], Any], fault: bool = True) -> Derivation:
    def function(w: Any, x: Any) -> Any:
        y = first(x[..., None] * w["n"], x @ w["m"] + w["mb"]) @ w["o"] + w["ob"]
        return (jnp.tanh(y) if fault else 1 / (1 + jnp.exp(-y))) @ w["t"] + w["tb"]

    return derive(function, Fields(of_torch), FIELDS, floats(16, 3))


@pytest.mark.parametrize("fault", [True, False])
def test_what_follows_in_front_of_the_difference_tells_elements_apart_that_meet_one_number(fault: bool) -> None:
    found = of_fields(lambda e, y: jnp.tanh(e).sum(1) + y, lambda e, y: e.tanh().sum(1) + y, fault)
    number = found.tensor("number")
    assert number.ties == () and number.grade is (Grade.IN_FRONT if fault else Grade.DERIVED)
    if fault:
        (difference,) = found.differences
        assert "sigmoid" in difference.problem and not any(said.startswith("tied") for said in summary(found, {}))


@pytest.mark.slow
def test_elements_that_nothing_in_front_of_the_difference_tells_apart_are_tied() -> None:
    """Any order of the embedding's elements gives the sum of their squares."""
    found = of_fields(lambda e, y: (e**2).sum((1, 2))[:, None] + y, lambda e, y: (e**2).sum((1, 2))[:, None] + y)
    assert found.tensor("number").grade is Grade.TIED
    (said,) = [line for line in summary(found, {}) if line.startswith("tied: number")]
    assert "nothing in front of the difference tells them apart; larger inputs may" in said


def test_rows_of_other_values_are_named_where_the_indices_alone_are_the_same() -> None:
    """Of the nearest rows one program takes what the layer gives, the other one the sines of the input."""

    def function(w: Any, x: Any) -> Any:
        return jnp.tanh((x @ w["a"])[jax.lax.top_k(x @ x.T, 3)[1]]) @ w["b"]

    class Nearest(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in "ab")

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x[(x @ x.mT).topk(3).indices].sin()).tanh())

    found = derive(function, Nearest(), dict.fromkeys("ab", (WIDTH, WIDTH)), floats(9, WIDTH))
    (difference,) = found.differences
    assert difference.brief == "the target takes rows of the input x, and the JAX model of what a gives"
    assert "; the JAX model takes rows of what a gives (" in difference.problem
    assert "of the same" not in difference.problem


class OfParts(torch.nn.Module):
    """A layer for each part of the tokens, and a head of two layers for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in PARTS)
        self.inner, self.outer = torch.nn.Linear(6, 6), torch.nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        own = [torch.tanh(layer(part)) for layer, part in zip(self.own, x.split(PARTS, 1), strict=True)]
        return torch.cat([self.outer(torch.nn.functional.silu(self.inner(y))) for y in own], 1)


@pytest.mark.slow
@pytest.mark.parametrize("second", [lambda x: x, jnp.sin])
def test_a_layer_beside_a_value_that_was_given_is_in_front(second: Function) -> None:
    """The head differs; behind its first use the second layer meets its own tokens, and nothing that was given."""

    def function(p: Any, x: Any) -> Any:
        first, other, last = jnp.split(x, (3, 5), 1)
        own = [jnp.tanh(part @ p[f"w{k}"] + p[f"b{k}"]) for k, part in enumerate((first, second(other), last))]
        return jnp.concatenate([jax.nn.relu(y @ p["inner"] + p["c"]) @ p["outer"] + p["d"] for y in own], 1)

    shapes: dict[str, tuple[int, ...]] = {"inner": (6, 6), "c": (6,), "outer": (6, 5), "d": (5,)}
    shapes |= {f"{name}{k}": (6, 6)[: 1 + (name == "w")] for k in range(len(PARTS)) for name in "wb"}
    found = derive(function, OfParts(), shapes, floats(4, sum(PARTS), 6))
    in_front = {tensor.name for tensor in found.tensors if tensor.grade is Grade.IN_FRONT}
    assert found.proof is None and {"own.0.weight", "own.0.bias", "inner.weight", "inner.bias"} <= in_front
    assert ("own.1.weight" in in_front) is ("own.1.bias" in in_front) is (second is not jnp.sin)
    assert in_front.isdisjoint(("outer.weight", "outer.bias"))
