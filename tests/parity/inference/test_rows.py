"""Rows are taken before a layer in one program, and behind it or not at all in the other: tokens of experts, nodes at the ends of edges."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import UNPROVEN, derive, floats, grades, rules, sources

D, E = 8, 3
STACKED: dict[str, tuple[int, ...]] = {
    "router": (D, E),
    "gate": (E, D, D),
    "up": (E, D, D),
    "down": (E, D, D),
    "out": (D, D),
}


def _experts(w: Any, x: Any) -> Any:
    """All experts see all tokens, and the gates of those that are not chosen are zero."""
    top, chosen = jax.lax.top_k(x @ w["router"], 2)
    gates = (jax.nn.one_hot(chosen, E) * jax.nn.softmax(top)[..., None]).sum(-2)
    h = jax.nn.silu(jnp.einsum("td,edf->tef", x, w["gate"])) * jnp.einsum("td,edf->tef", x, w["up"])
    return jnp.tanh(x + jnp.einsum("tef,efd,te->td", h, w["down"], gates)) @ w["out"]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Routed(nn.Module):
    """Each expert sees its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(D, E, bias=False), nn.Linear(D, D, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x: Any) -> Any:
        top, chosen = self.router(x).topk(2, -1)
        gates, y = top.softmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            row, place = torch.where(chosen == k)
            y = y.index_add(0, row, expert(x[row]) * gates[row, place, None])
        return self.out(torch.tanh(x + y))


def test_experts_that_see_their_own_tokens() -> None:
    module = Routed()
    found = derive(_experts, module, STACKED, floats(24, D))
    assert grades(found) == {Grade.DERIVED}
    written = "\n".join(rules(found, module))
    assert '  from: "{gate,up}"\n  stacked: {i: 0}\n  linear: experts.{i}.{w1,w3}' in written
    assert "  from: down\n  stacked: {i: 0}\n  linear: experts.{i}.w2" in written


def _fused_experts(w: Any, x: Any) -> Any:
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
    gates = (jax.nn.one_hot(chosen, 4) * gates[..., None]).sum(-2)
    h = jnp.einsum("btd,edcf->btecf", x, w["gate_up"])
    h = jax.nn.silu(h[..., 0, :]) * h[..., 1, :]
    return jnp.tanh(x + jnp.einsum("btef,efd,bte->btd", h, w["down"], gates)) @ w["out"]


class RoutedBatch(Routed):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 4, bias=False), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Any) -> Any:
        h = x.view(-1, D)
        (gates, chosen), y = self.router(h).softmax(-1).topk(2, -1), torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            row, place = torch.where(chosen == k)
            y = y.index_add(0, row, expert(h[row]) * gates[row, place, None])
        return self.out(torch.tanh(x + y.view_as(x)))


def test_a_wrong_router_is_refuted_by_its_softmax() -> None:
    """Otherwise each part of the experts' leaf that is as wide as the router is followed through all experts: 1,000s of candidates."""
    shapes = {"router": (D, 4), "gate_up": (4, D, 2, D), "down": (4, D, D), "out": (D, D)}
    found = derive(_fused_experts, RoutedBatch(), shapes, floats(2, 9, D))
    assert grades(found) == {Grade.DERIVED}
    assert found.tried < 1000


def _with_shared(count: int) -> Any:
    """Return a JAX function: experts fused as [E, D, 2, F], and a shared one times its own gate."""

    def function(w: Any, x: Any) -> Any:
        gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["router"]), 2)
        gates = (jax.nn.one_hot(chosen, count) * gates[..., None]).sum(-2)
        h = jnp.einsum("btd,edcf->btecf", x, w["gate_up"])
        h = jax.nn.silu(h[..., 0, :]) * h[..., 1, :]
        shared = (jax.nn.silu(x @ w["s1"]) * (x @ w["s3"])) @ w["s2"]
        y = jnp.einsum("btef,efd,bte->btd", h, w["down"], gates) + jax.nn.sigmoid(x @ w["g"]) * shared
        return jnp.tanh(x + y) @ w["out"]

    return function


class WithShared(RoutedBatch):
    """`order`: which expert each module is; `gated`: whether the shared expert has a gate."""

    def __init__(self, count: int, order: Any = None, gated: bool = True) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, count, bias=False), nn.ModuleList(Expert() for _ in range(count))
        self.shared, self.gate = Expert(), nn.Linear(D, 1, bias=False)
        self.order, self.gated = order or range(count), gated

    def forward(self, x: Any) -> Any:
        h = x.view(-1, D)
        (gates, chosen), y = self.router(h).softmax(-1).topk(2, -1), torch.zeros_like(h)
        for k, which in enumerate(self.order):
            row, place = torch.where(chosen == k)
            y = y.index_add(0, row, self.experts[which](h[row]) * gates[row, place, None])
        shared = self.shared(h)
        y = y + (torch.sigmoid(self.gate(h)) * shared if self.gated else shared)
        return self.out(torch.tanh(x + y.view_as(x)))


def _shapes(count: int) -> dict[str, tuple[int, ...]]:
    experts = {"router": (D, count), "gate_up": (count, D, 2, D), "down": (count, D, D)}
    return experts | dict.fromkeys(("s1", "s2", "s3", "out"), (D, D)) | {"g": (D, 1)}


@pytest.mark.slow
def test_each_expert_is_tried_like_the_one_before() -> None:
    """Five experts took more than 20,000 candidates: each order of them was followed to the sum."""
    tried = {}
    for count in (5, 10):
        module = WithShared(count)
        found = derive(_with_shared(count), module, _shapes(count), floats(2, 3 * count, D))
        assert grades(found) == {Grade.DERIVED}
        tried[count] = found.tried
    assert tried[5] < 300
    assert tried[10] < 3 * tried[5]  # of the first expert, all are tried


def test_experts_in_another_order() -> None:
    module = WithShared(5, order=(0, 3, 2, 1, 4))
    found = derive(_with_shared(5), module, _shapes(5), floats(2, 15, D))
    assert grades(found) == {Grade.DERIVED}
    theirs = np.arange(5 * D * D).reshape(5, -1)
    (part,) = found.tensor("experts.3.w2.weight").parts
    assert part.leaf == "down" and set(part.positions) == set(theirs[1])


@pytest.mark.slow
def test_a_shared_expert_without_its_gate_is_a_difference() -> None:
    found = derive(_with_shared(5), WithShared(5, gated=False), _shapes(5), floats(2, 15, D))
    assert not found.complete and len(found.differences) == 1


BIASED = {"router": (D, E), "wi": (E, D, D), "bi": (E, D), "wo": (E, D, D), "bo": (E, D), "out": (D, D)}


def _biased_experts(w: Any, x: Any) -> Any:
    top, chosen = jax.lax.top_k(x @ w["router"], 2)
    gates = (jax.nn.one_hot(chosen, E) * jax.nn.softmax(top)[..., None]).sum(-2)
    h = jax.nn.gelu(jnp.einsum("td,edf->tef", x, w["wi"]) + w["bi"])
    y = jnp.einsum("tef,efd->ted", h, w["wo"]) + w["bo"]
    return jnp.tanh(x + jnp.einsum("ted,te->td", y, gates)) @ w["out"]


class BiasedExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class Skipping(Routed):
    """Experts with biases; one without tokens does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(BiasedExpert() for _ in range(E))

    def forward(self, x: Any) -> Any:
        top, chosen = self.router(x).topk(2, -1)
        gates, y = top.softmax(-1), torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            row, place = torch.where(chosen == k)
            if len(row):
                y = y.index_add(0, row, expert(x[row]) * gates[row, place, None])
        return self.out(torch.tanh(x + y))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [24, 2])
def test_experts_with_biases_of_which_some_see_no_token(tokens: int) -> None:
    """Two tokens go to the same two experts, by the weights of the module and by those that are drawn."""
    module = Skipping()
    with torch.no_grad():
        module.router.weight[1:] = 0
    found = derive(_biased_experts, module, BIASED, floats(tokens, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    written = "\n".join(rules(found, module))
    assert '  from: "{wi,wo}"\n  bias: "{bi,bo}"\n  stacked: {i: 0}\n  linear: experts.{i}.{fc1,fc2}' in written


@pytest.mark.slow
def test_experts_of_which_one_has_another_activation() -> None:
    module = Skipping()
    module.experts[1].forward = lambda x: module.experts[1].fc2(functional.gelu(module.experts[1].fc1(x)))
    found = derive(_biased_experts, module, BIASED, floats(24, D))
    assert not found.complete and found.differences and grades(found) <= UNPROVEN


NODES = 9
A, B = np.random.default_rng(0).integers(0, NODES, (2, 20), np.int32)  # the ends of the edges
GRAPH: dict[str, tuple[int, ...]] = {
    f"{k}/{name}": (D, D) for k in range(2) for name in ("edge", "sent", "got", "own", "sum")
}
GRAPH |= {f"{k}/{name}": (D,) for k in range(2) for name in ("bias", "shift")}


def _graph(w: Any, x: Any) -> Any:
    """The nodes are multiplied before they are gathered, and each value has a matrix of its own."""
    e = x[A] * x[B]
    for k in range(2):
        p = {name: w[f"{k}/{name}"] for name in ("edge", "sent", "got", "own", "sum", "bias", "shift")}
        m = jnp.tanh((x @ p["sent"])[A] + (x @ p["got"])[B] + e @ p["edge"] + p["bias"])
        e = e + m
        x = x + jnp.tanh(x @ p["own"] + jax.ops.segment_sum(m, B, NODES) @ p["sum"] + p["shift"])
    return x


class Graph(nn.Module):
    """The nodes are gathered first, and values stand side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.ModuleList(nn.Linear(3 * D, D) for _ in range(2))
        self.node = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(2))

    def forward(self, x: Any) -> Any:
        a, b = torch.as_tensor(A), torch.as_tensor(B)
        e = x[a] * x[b]
        for edge, node in zip(self.edge, self.node, strict=True):
            m = torch.tanh(edge(torch.cat([e, x[a], x[b]], -1)))
            e = e + m
            x = x + torch.tanh(node(torch.cat([torch.zeros_like(x).index_add(0, b, m), x], -1)))
        return x


@pytest.mark.slow
def test_a_product_that_is_gathered_and_added_to_others() -> None:
    module = Graph()
    found = derive(_graph, module, GRAPH, floats(NODES, D))
    assert grades(found) == {Grade.DERIVED}
    assert sources(found)["edge.1.weight"] == ("1/edge", "1/sent", "1/got")
    assert rules(found, module)[0].split("\n  ") == [
        '- from: "{i}/{edge,sent,got}"',
        "axes: CD",
        'parameter: {name: "edge.{i}.weight", axes: "D(C + C + C)"}',
    ]


PAIRS: dict[str, tuple[int, ...]] = {"to": (D, D), "from": (D, D), "far": (D,), "bias": (D,), "out": (2 * D, D)}


def _all_pairs(w: Any, x: Any, own: bool = False) -> Any:
    """Messages between all pairs of nodes, of which those of a node to itself do not count."""
    far = ((x[:, None] - x[None]) ** 2).sum(-1)
    m = (x @ w["to"])[:, None] + (x @ w["from"])[None] + far[..., None] * w["far"] + w["bias"]
    return (
        jnp.concatenate([x, jnp.einsum("ij,ijd->id", 1 - (not own) * jnp.eye(len(x)), jax.nn.silu(m))], -1) @ w["out"]
    )


class Pairs(nn.Module):
    """The distance of two nodes stands beside their features, and no node has an edge to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.edge, self.node = nn.Linear(2 * D + 1, D), nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Any) -> Any:
        a, b = torch.where(~torch.eye(len(x), dtype=torch.bool))
        far = ((x[a] - x[b]) ** 2).sum(1, keepdim=True)
        m = functional.silu(self.edge(torch.cat([x[a], x[b], far], 1)))
        return self.node(torch.cat([x, torch.zeros_like(x).index_add(0, a, m)], 1))


def test_pairs_of_nodes_without_those_of_a_node_and_itself_whose_distance_is_zero() -> None:
    found = derive(_all_pairs, Pairs(), PAIRS, floats(NODES, D))
    assert grades(found) == {Grade.DERIVED}
    assert sources(found)["edge.weight"] == ("to", "from", "far")


@pytest.mark.slow
def test_messages_of_nodes_to_themselves_are_a_difference() -> None:
    found = derive(lambda w, x: _all_pairs(w, x, own=True), Pairs(), PAIRS, floats(NODES, D))
    assert not found.complete and found.proof is None
