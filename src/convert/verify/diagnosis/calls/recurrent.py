"""Search for another way to call torch's recurrent layers: with their states exchanged, or a sequence turned round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from convert.programs.rewrites.direction import REVERSED
from convert.references.protocol import Reference
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.other_operation import USER_FAILS
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.whole_model import run_again

EXCHANGED = "states exchanged"


def other_states(site: Site, reference: Reference) -> Search:
    """Run the whole model with the states of an LSTM exchanged, and with the sequence that a layer reads or gives reversed."""
    layers = {name: module for name, module in site.module.named_modules() if isinstance(module, torch.nn.RNNBase)}
    for name, layer in layers.items():
        for mistake, problem, change in _calls(name, layer):
            try:
                with change:
                    error = site.error(run_again(site, reference))
            except USER_FAILS:  # the states have not the same shape, or the input has no such axis
                continue
            if error <= site.enough:
                fix = f"correct the code around {name}, or the JAX model"
                return Search(Explanation(mistake, problem, site.rule(name), fix, error))
    return Search(ruled_out=(EXCHANGED, REVERSED) if layers else ())


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
