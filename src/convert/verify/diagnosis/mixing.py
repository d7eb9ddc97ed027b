"""Search for a mistake in the code of attention or of a gated layer, computed from the values of the projections in front of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.layers.activations import ACTIVATIONS, torch_activation
from convert.references.protocol import INPUT, Variant
from convert.verify.diagnosis.compare import Search, compare_variants, replaced
from convert.verify.diagnosis.site import Site

Array = np.ndarray[Any, np.dtype[Any]]
EXCHANGED_GATE = "gate and up exchanged"
ROLES = "qkv"  # the names of the three projections begin so in every library
MAX_HEADS = 256


@dataclass(frozen=True)
class Attention:
    """What attention computes of q, k and v.

    Attributes:
        heads: of the queries.
        scale: by which power of a head's width the scores are multiplied.
        causal: whether later positions are hidden.
        in_turns: whether each key head serves every n-th query head, and not n next to each other.
        exchanged: whether the scores are those of keys with queries.
    """

    heads: int
    scale: float = -0.5
    causal: bool = False
    in_turns: bool = False
    exchanged: bool = False

    def run(self, q: Array, k: Array, v: Array) -> Array:
        """Compute it, for values whose last axis has all heads, from [batch, time, width] to the same."""
        batch, steps, width = q.shape
        head = width // self.heads
        groups = k.shape[-1] // head
        query, key, value = (x.reshape(*x.shape[:2], -1, head) for x in (q, k, v))
        served = np.arange(self.heads) % groups if self.in_turns else np.arange(self.heads) // (self.heads // groups)
        key, value = key[:, :, served], value[:, :, served]
        one, two = (key, query) if self.exchanged else (query, key)
        scores = np.einsum("btnh,bsnh->bnts", one, two) * head**self.scale
        if self.causal:
            scores = np.where(np.tri(steps, k.shape[1], dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("bnts,bsnh->btnh", scores / scores.sum(-1, keepdims=True), value)
        return np.asarray(mixed.reshape(batch, steps, width))


def other_mixing(site: Site) -> Search:
    """Search for another attention, or another gate, in front of the layer whose input differs."""
    if not site.boundary.endswith(INPUT):
        return Search()
    for variants, name in ((list(_attentions(site)), _attention_mistake), (list(_gates(site)), _gate_mistake)):
        if variants:
            search = compare_variants(site, variants, "", name)
            if search.explanation is not None and search.explanation.target_known:
                return search
    return Search()


def _before(site: Site) -> list[str]:
    """Return the outputs of the layers in front of the site that are in the same module, in the order of the data."""
    names = list(site.evidence.native_values)
    holder = site.name.rpartition(".")[0]
    earlier = names[: names.index(site.boundary)]
    return [
        name
        for name in earlier
        if name.rpartition(".")[0] == holder and not name.endswith(INPUT) and name in site.seen.values
    ]


def _attentions(site: Site) -> Iterator[Variant]:
    """Yield kinds of attention over the three projections before the site, for each number of heads that fits."""
    names = [next((name for name in _before(site) if _last(name).startswith(role)), "") for role in ROLES]
    if not all(names):
        return
    q, k, v = (site.seen.values[name] for name in names)
    wanted = site.evidence.shape(site.boundary)
    if q.ndim != 3 or q.shape != wanted or k.shape != v.shape or k.shape[:2] != q.shape[:2]:
        return
    for heads in range(1, min(MAX_HEADS, q.shape[-1]) + 1):
        if q.shape[-1] % heads or k.shape[-1] % (q.shape[-1] // heads):
            continue
        groups = k.shape[-1] // (q.shape[-1] // heads)
        if heads % groups:
            continue
        turns = (False, True) if 1 < groups < heads else (False,)
        for exchanged, scale, causal, in_turns in itertools.product(
            (False, True), (-0.5, 0.0, -1.0), (False, True), turns
        ):
            how = Attention(heads, scale, causal, in_turns, exchanged)
            if not exchanged or q.shape == k.shape or groups != heads:
                yield Variant(str(how), lambda seen, how=how: how.run(*(seen.values[n] for n in names)), params=how)  # type: ignore[misc]


def _attention_mistake(torch: Variant, jax: Variant) -> str:
    ours, theirs = torch.params, jax.params
    differences = {
        "q and k exchanged": ours.exchanged != theirs.exchanged,
        "attention scale missing": ours.scale == 0 != theirs.scale,
        "attention scale that the JAX model lacks": theirs.scale == 0 != ours.scale,
        "attention scale doubled": ours.scale == -1 and theirs.scale == -0.5,
        "no causal mask": theirs.causal and not ours.causal,
        "a causal mask that the JAX model lacks": ours.causal and not theirs.causal,
        "key heads in turns, not in groups": ours.in_turns and not theirs.in_turns,
        "key heads in groups, not in turns": theirs.in_turns and not ours.in_turns,
        f"{ours.heads} heads for {theirs.heads}": ours.heads != theirs.heads,
    }
    return " and ".join(name for name, differs in differences.items() if differs) or replaced(torch, jax)


def _gates(site: Site) -> Iterator[Variant]:
    """Yield products of two values in front of the site, one of them activated."""
    shape = site.evidence.shape(site.boundary)
    names: Sequence[str] = [name for name in _before(site) if site.seen.values[name].shape == shape][-2:]
    if len(names) != 2:
        return
    import torch

    for activation, (one, two) in itertools.product(ACTIVATIONS, (tuple(names), tuple(reversed(names)))):
        function = torch_activation(activation)

        def product(seen: Any, function: Any = function, one: str = one, two: str = two) -> Array:
            gated = function(torch.tensor(seen.values[one], dtype=torch.float64))
            return np.asarray((gated * torch.tensor(seen.values[two], dtype=torch.float64)).numpy())

        yield Variant(f"{activation}({_last(one)}) * {_last(two)}", product, params=(activation, one))


def _gate_mistake(torch: Variant, jax: Variant) -> str:
    (ours, gate), (theirs, other) = torch.params, jax.params
    if gate != other and ours == theirs:
        return EXCHANGED_GATE
    return f"{ours} for {theirs}" if gate == other else replaced(torch, jax)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
