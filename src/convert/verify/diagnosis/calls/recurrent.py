"""Search for another way to call torch's recurrent layers: states exchanged, a sequence turned round, or its padding left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from convert.programs.rewrites.recurrences.direction import REVERSED
from convert.references.protocol import Reference
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.whole_model import run_again
from convert.verify.sides.records import USER_FAILS

Array = np.ndarray[Any, np.dtype[Any]]
EXCHANGED = "states exchanged"
PADDED, PACKED = "padding read by the recurrence", "padding not read by the recurrence"


def other_states(site: Site, reference: Reference) -> Search:
    """Run the whole model with other calls of a recurrent layer, or of all."""
    layers = {name: module for name, module in site.module.named_modules() if isinstance(module, torch.nn.RNNBase)}
    lengths = dict(_lengths(site.evidence.inputs))
    for name, layer in layers.items():
        for mistake, problem, change in (*_calls(name, layer), *_padding(name, layer, list(layers.values()), lengths)):
            try:
                with change:
                    error = site.error(run_again(site, reference))
            except USER_FAILS:  # the states have not the same shape, or the input has no such axis
                continue
            if error <= site.enough:
                fix = f"correct the code around {name}, or the JAX model"
                return Search(Explanation(mistake, problem, site.rule(name), fix, error))
    return Search(ruled_out=(EXCHANGED, REVERSED, *([PADDED] if lengths else [])) if layers else ())


def _calls(name: str, layer: torch.nn.RNNBase) -> Iterator[tuple[str, str, AbstractContextManager[None]]]:
    """Yield the mistakes, what is wrong in words, and the context in which the layer is called without it."""
    time = 1 if layer.batch_first else 0

    def turned(x: torch.Tensor, *states: Any) -> tuple[Any, ...]:
        return x.flip(time), *states

    def exchanged(x: torch.Tensor, states: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, ...]:
        return x, states[::-1]

    if layer.mode == "LSTM":
        yield (
            EXCHANGED,
            f"{name} is given (c, h) as its first state; torch takes (h, c)",
            _hooked(layer, exchanged, None),
        )
    problem = f"axis {time}, the sequence, of what {name} {{}} is in the reverse order of the JAX model's"
    yield REVERSED, problem.format("gives"), _hooked(layer, None, turned)
    yield REVERSED, problem.format("is given"), _hooked(layer, turned, None)
    yield REVERSED, problem.format("is given and gives"), _hooked(layer, turned, turned)


def _lengths(inputs: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Yield the inputs that may say how long each sequence is: as numbers, or as a mask that begins with ones."""
    for name, x in inputs.items():
        if x.ndim == 1 and x.dtype.kind in "iu" and x.size and x.min() > 0:
            yield name, x
        if x.ndim == 2 and x.dtype.kind in "biu" and set(np.unique(x)) <= {0, 1}:
            counts = x.sum(1)
            if counts.min() > 0 and (x.astype(bool) == (np.arange(x.shape[1]) < counts[:, None])).all():
                yield name, counts


def _padding(
    name: str, layer: torch.nn.RNNBase, every: Sequence[torch.nn.RNNBase], lengths: Mapping[str, Array]
) -> Iterator[tuple[str, str, AbstractContextManager[None]]]:
    """Yield the calls in which a layer, or each, reads no padding, or all of it."""
    for key, counts in lengths.items():
        for layers in ([layer], *([every] if len(every) > 1 and layer is every[0] else [])):
            of = name if len(layers) == 1 else "each recurrent layer"
            problem = (
                f"{of} reads its input up to the end; the outputs are equal when it reads as many steps as {key} says"
            )
            yield PADDED, problem, _all(_packed(one, counts) for one in layers)
    problem = f"{name} leaves padding out; the outputs are equal when it reads all steps"
    yield PACKED, problem, _unpacked(layer)


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _packed(layer: torch.nn.RNNBase, counts: Array) -> AbstractContextManager[None]:
    """Let a layer read as many steps of each sequence as these counts say."""
    time = 1 if layer.batch_first else 0
    steps: list[int] = []

    def given(x: Any, *states: Any) -> tuple[Any, ...]:
        if isinstance(x, PackedSequence) or x.shape[1 - time] != len(counts) or x.shape[time] < counts.max():
            raise ValueError("not a batch of these sequences")
        steps.append(x.shape[time])
        known = torch.as_tensor(counts.astype(np.int64))
        return pack_padded_sequence(x, known, batch_first=layer.batch_first, enforce_sorted=False), *states

    def made(x: PackedSequence, *states: Any) -> tuple[Any, ...]:
        whole, _ = pad_packed_sequence(x, batch_first=layer.batch_first, total_length=steps.pop())
        return whole, *states

    return _hooked(layer, given, made)


def _unpacked(layer: torch.nn.RNNBase) -> AbstractContextManager[None]:
    """Let a layer read the padding, too."""
    counts: list[torch.Tensor] = []

    def given(x: Any, *states: Any) -> tuple[Any, ...]:
        if not isinstance(x, PackedSequence):
            raise TypeError("not packed")
        whole, known = pad_packed_sequence(x, batch_first=layer.batch_first)
        counts.append(known)
        return whole, *states

    def made(x: torch.Tensor, *states: Any) -> tuple[Any, ...]:
        return pack_padded_sequence(x, counts.pop(), batch_first=layer.batch_first, enforce_sorted=False), *states

    return _hooked(layer, given, made)


@contextmanager
def _hooked(
    layer: torch.nn.Module, given: Callable[..., tuple[Any, ...]] | None, made: Callable[..., tuple[Any, ...]] | None
) -> Iterator[None]:
    """Change what a layer is given, and what it gives, within this context."""
    handles = []
    if given is not None:
        handles.append(
            layer.register_forward_pre_hook(lambda _, args, kwargs: (given(*args, **kwargs), {}), with_kwargs=True)
        )
    if made is not None:
        handles.append(layer.register_forward_hook(lambda _, args, result: made(*result)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
