"""Faults in the code of series and sequences of different lengths, with outputs alone: paddings, axes, states, values computed again."""

from __future__ import annotations

import torch
from torch.nn import functional

from faults.expected import Fault
from faults.planted.small import fault
from support.series_model import HEAD, HEADS, Lengths, Series, unit

PADDING, MODULES, AXES, ORDER = "another padding", "modules exchanged", "axes exchanged", "elements in another order"
MOVED, OPERANDS = "operations in another order", "operands exchanged"
AGAIN, UNREAD = "layer applied again", "padding read by the recurrence"


def exchanged(module: Series, x: torch.Tensor, state: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return Series.step(module, x, cell, state)


def unpacked(module: Lengths, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(module.rnn(x)[0])


SERIES_FAULTS: tuple[Fault, ...] = (
    fault("causal convolution padded at both ends", "series", PADDING, padded=lambda module, x: functional.pad(x, (1, 1))),
    fault("causal convolution padded at the end", "series", PADDING, padded=lambda module, x: functional.pad(x, (0, 2))),
    fault("tokens in front in the other order", "series", MODULES, joined=lambda module, x, first, second: torch.cat((second, first, x), 1)),
    fault("heads in front of keys and values", "series", AXES, parts=lambda module, x: x.unflatten(-1, (HEADS, 2, HEAD)).unbind(3)),
    fault("features in front of heads", "series", ORDER, queries=lambda module, x: unit(x.unflatten(-1, (HEAD, HEADS)).transpose(-1, -2))),
    fault("length of all heads at once", "series", MOVED, queries=lambda module, x: unit(x).unflatten(-1, (HEADS, HEAD))),
    fault("keys and values computed again in each round", "series", AGAIN, again=lambda module, x, keys, values: module.parts(module.kv(x))),
    fault("state and cell exchanged in each step", "series", OPERANDS, step=exchanged),
    fault("softplus of another beta", "series", "softplus with beta 2 for softplus", given=lambda module, x: functional.softplus(module.out(x), 2).log_softmax(-1)),
    fault("softmax without the logarithm", "series", "softmax over the last axis for log_softmax over the last axis", given=lambda module, x: functional.softplus(module.out(x)).softmax(-1)),
    fault("padding read by the recurrence", "lengths", UNREAD, ran=unpacked),
    fault("scores of padding not hidden", "lengths", "operation missing", masked=lambda module, scores, lengths: scores),
    fault("the step in front of the last", "lengths", "rows off by one", last=lambda module, x, lengths: x[torch.arange(len(x)), lengths - 2]),
)  # fmt: skip
