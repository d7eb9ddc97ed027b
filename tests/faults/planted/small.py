"""Faults in the code of small models, with outputs alone: norms and RoPE, positions and frequencies, experts, states, fused heads."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from faults.expected import Fault
from faults.plants import InTarget
from support.parts_model import WAVES
from support.small_model import HEAD, HEADS, WIDTH
from support.small_models import CHOSEN

BEHIND, IN_FRONT = "norm behind RoPE", "norm in front of RoPE"
FREQUENCIES, CONSTANT = "frequencies divided by another number", "another constant"
BASE = "RoPE of another base"
BIASED = "bias of a choice added to its weights"
NOT_GIVEN, STALE, REVERSED = "state not given on", "stale state across steps", "sequence in the reverse order"
LARGEST, UNREAD, PARTS = "another number of largest values", "input that the target does not use", "parts exchanged"


def fault(name: str, case: str, diagnosis: str, at: str = "y", **changed: Any) -> Fault:
    """Other methods and attributes of the target's module."""

    def edit(module: Any) -> None:
        for key, value in changed.items():
            assert hasattr(module, key), key
            setattr(module, key, MethodType(value, module) if callable(value) else value)

    return Fault(name, case, "torch", InTarget(edit), "model", at, diagnosis)


def given_out_late(module: Any, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each step gives out the state that it begins with."""
    keep, made = module.keep.sigmoid(), []
    for step in x.unbind(1):
        made.append(state)
        state = module.step(module.into(step), keep, state)
    return torch.stack(made, 1), state


def keys_late(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Keys are rotated in front of their norm, queries behind it."""
    q, k, v = (layer(x).unflatten(-1, (HEADS, HEAD)) for layer in (module.q, module.k, module.v))
    q, k = module.turned(module.q_norm(q), 0), module.k_norm(module.turned(k, 0))
    shares = (torch.einsum("btnh,bsnh->bnts", q, k) * HEAD**-0.5).softmax(-1)
    return torch.as_tensor(module.o(torch.einsum("bnts,bsnh->btnh", shares, v).flatten(2)))


def frequencies(divisor: float, sign: int = 1, every: int = 2) -> Callable[[Any], torch.Tensor]:
    return lambda module: (
        sign * module.base ** (-torch.arange(0, every * HEAD // 2, every, dtype=torch.float64) / divisor)
    )


def weighted(scores: torch.Tensor) -> torch.Tensor:
    return scores / scores.sum(-1, keepdim=True) * 1.5


def from_the_first(module: Any, x: torch.Tensor, state: torch.Tensor, zeros: bool = False) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Each step begins with the state that the first one is given, or with zeros."""
    begin = lambda: torch.zeros_like(state) if zeros else state  # noqa: E731
    made = [module.step(module.into(step), module.keep.sigmoid(), begin()) for step in x.unbind(1)]
    return torch.stack(made, 1), made[-1]


def from_the_end(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The recurrence reads the sequence from its end, as the backward direction of a layer does."""
    made, _ = module.ran(x.flip(1), x.new_zeros(len(x), WIDTH))
    return torch.as_tensor(module.out(made.flip(1)))


def with_first(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The first states are computed."""
    module.first(x)
    return torch.as_tensor(x + module.rnn(x)[0])


def from_the_call_before(module: Any, x: torch.Tensor, states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A call begins with the state that the call before ended with; the first one is right."""
    y, (h, _) = module.rnn(x, tuple(state + getattr(module, "last", 0) for state in states))
    module.last = h
    return torch.as_tensor(y)


SMALL_FAULTS: tuple[Fault, ...] = (
    fault("RoPE in front of the norms", "norm-rope", BEHIND, order="RoPE first"),
    fault("RoPE in front of the norm of keys alone", "norm-rope", BEHIND, forward=keys_late),
    fault("norms in front of RoPE", "rope-norm", IN_FRONT, order="norm first"),
    fault("RoPE positions of keys begin at one", "norm-rope", "positions off by one", first_k=1),
    fault("RoPE positions of queries begin at two", "norm-rope", "positions off by 2", first_q=2),
    fault("RoPE positions of keys begin at one, in front of the norms", "rope-norm", "positions off by one", first_k=1),
    fault("RoPE exponents divided by H - 2", "norm-rope", FREQUENCIES, frequencies=frequencies(HEAD - 2)),
    fault("RoPE exponents of features for pairs", "norm-rope", FREQUENCIES, frequencies=frequencies(HEAD, every=1)),
    fault("RoPE of base 500000, divided by H", "norm-rope", BASE, base=500000.0),
    fault("RoPE's angles of the other sign", "norm-rope", "angles of the other sign", frequencies=frequencies(HEAD, sign=-1)),
    fault("learned positions off by one", "positions", "positions off by one", offset=3),
    fault("learned positions without their offset of two", "positions", "positions off by 2", offset=0),
    fault("sines and cosines begin at one", "positions", "positions off by one", first=1),
    fault("exponents of sines divided by D/2 - 1", "positions", FREQUENCIES, divisor=WIDTH / 2 - 1),
    fault("exponents of sines divided by D", "positions", FREQUENCIES, divisor=float(WIDTH)),
    fault("normaliser cast to bfloat16", "positions", "rounded to a narrower dtype", embedded=lambda module, tokens: module.table(tokens) * torch.tensor(WIDTH**0.5).to(torch.bfloat16).to(module.table.weight.dtype)),
    fault("normaliser written as bfloat16 rounds it", "positions", "number rounded to a narrower dtype", embedded=lambda module, tokens: module.table(tokens) * 3.46875),
    fault("another normaliser", "positions", CONSTANT, embedded=lambda module, tokens: module.table(tokens) * 3.5),
    fault("normaliser left out", "positions", "operation missing", embedded=lambda module, tokens: module.table(tokens)),
    fault("weights of the experts with the balance bias", "experts", BIASED, shares=lambda module, scores, chosen: weighted((scores + module.balance).gather(-1, chosen))),
    fault("weights of the experts are what they are chosen by", "experts", BIASED, shares=lambda module, scores, chosen: weighted((scores + module.balance).topk(CHOSEN, -1).values)),
    fault("experts chosen without the balance bias", "experts", "operation missing", chosen=lambda module, scores: scores.topk(CHOSEN, -1).indices),
    fault("one expert for two", "experts", LARGEST, chosen=lambda module, scores: (scores + module.balance).topk(1, -1).indices),
    fault("three experts for two", "experts", LARGEST, chosen=lambda module, scores: (scores + module.balance).topk(3, -1).indices),
    fault("weights of the experts do not add up", "experts", "operation missing", shares=lambda module, scores, chosen: scores.gather(-1, chosen) * 1.5),
    fault("the second call begins with zeros", "states", NOT_GIVEN, given=lambda module, state: torch.zeros_like(state)),
    fault("each step begins with the first state", "states", STALE, ran=from_the_first),
    fault("each step begins with zeros", "states", STALE, ran=lambda module, x, state: from_the_first(module, x, state, zeros=True)),
    fault("the state decays faster", "states", "operation that the JAX model lacks", step=lambda module, given, keep, state: torch.tanh(given + keep * keep * state)),
    fault("states given out in front of each step", "states", "states given out a step late", ran=given_out_late),
    fault("the recurrence runs from the end", "states", REVERSED, forward=from_the_end),
    fault("first states not given to the LSTM", "cell", NOT_GIVEN, forward=with_first),
    fault("first states not computed", "cell", NOT_GIVEN, forward=lambda module, x: x + module.rnn(x)[0]),
    fault("states of the LSTM exchanged", "cell", "states exchanged", ran=lambda module, x, states: module.rnn(x, states[::-1])[0]),
    fault("state kept from call to call", "cell", "state kept from call to call", ran=from_the_call_before),
    fault("the LSTM's sequence turned round", "cell", REVERSED, ran=lambda module, x, states: module.rnn(x, states)[0].flip(1)),
    fault("heads taken apart in front of the parts", "heads", "parts within heads", parts=lambda module, x: x.unflatten(-1, (HEADS, 3, HEAD)).unbind(3)),
    fault("dropout in eval mode", "map", "dropout in eval mode", flat=lambda module, x: torch.nn.functional.dropout(x.flatten(1), 0.3)),
    fault("softmax over the batch", "map", "log_softmax over axis 0 for log_softmax over the last axis", likely=lambda module, x: x.log_softmax(0)),
    fault("types of tokens ignored", "parts", UNREAD, embedded=lambda module, tokens, types: module.tokens(tokens) + module.types.weight[0]),
    fault("types of tokens looked up as zeros", "parts", UNREAD, embedded=lambda module, tokens, types: module.types(torch.zeros_like(types)) + module.tokens(tokens)),
    fault("tokens and their types exchanged", "parts", "indices exchanged", embedded=lambda module, tokens, types: module.tokens(types) + module.types(tokens)),
    fault("halves of a fused layer exchanged", "parts", PARTS, halves=lambda module, x: x.chunk(2, -1)[::-1]),
    fault("mean over the tokens in front of the last norm", "parts", "operations in another order", pooled=lambda module, x: module.norm(x.mean(1))),
    fault("square of the decay left out", "parts", "another power", rest=lambda module, rate: torch.sqrt(1 - torch.exp(rate))),
    fault("frequencies of the time divided by n - 1", "parts", FREQUENCIES, divisor=WAVES - 1.0),
    fault("frequencies of the time of base 1000", "parts", CONSTANT, base=1000.0),
)  # fmt: skip
