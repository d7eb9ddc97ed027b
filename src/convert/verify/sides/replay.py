"""Run a part of a PyTorch model again on its recorded arguments, and read the value at a boundary within it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from convert.numerics.real_numbers import tensor_in_float64
from convert.references.protocol import observe

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]


class Call(NamedTuple):
    """A call of a submodule.

    Attributes:
        args, kwargs: its arguments.
        state: what the submodules within it kept from earlier calls, such as the state of a recurrence: submodule -> attributes.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: Mapping[torch.nn.Module, Mapping[str, Any]]


@contextmanager
def calls(module: torch.nn.Module, names: Iterable[str]) -> Iterator[dict[str, Call]]:
    """Record the arguments of each submodule's first call while the module runs.

    Args:
        names: of submodules; names that the module does not have are ignored.
    """
    found: dict[str, Call] = {}
    known = dict(module.named_modules())

    def keep(name: str, called: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if name not in found:
            state = {submodule: _plain_attributes(submodule) for submodule in called.modules()}
            found[name] = Call(*copy.deepcopy((args, dict(kwargs))), state)

    handles = [
        known[name].register_forward_pre_hook(
            lambda called, args, kwargs, name=name: keep(name, called, args, kwargs), with_kwargs=True
        )
        for name in names
        if name in known
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the tensors and absent values that a module keeps as attributes, and neither as parameters nor as buffers."""
    import torch

    kept = {name: value for name, value in vars(module).items() if value is None or isinstance(value, torch.Tensor)}
    return {name: copy.deepcopy(value) for name, value in kept.items() if not name.startswith("_")}


@dataclass(frozen=True)
class Replay:
    """A boundary, and how to compute its value again.

    Attributes:
        module: the whole model, in float64.
        value: computes the value at the boundary with the current weights.
        places: names of written tensors that have another name in the module -> that name.
    """

    module: torch.nn.Module
    value: Callable[[], Array]
    places: Mapping[str, str] = field(default_factory=dict)

    def with_tensors(self, tensors: Mapping[str, Array]) -> Array:
        """Compute the value with other weights, and restore the weights afterwards.

        Args:
            tensors: by name as written.

        Raises:
            RuntimeError: a tensor has another shape.
        """
        import torch

        kept = {name: self._tensor(name).detach().clone() for name in tensors}
        try:
            with torch.no_grad():
                for name, value in tensors.items():
                    wide = np.complex128 if np.iscomplexobj(value) else np.float64
                    self._set(name, torch.as_tensor(np.array(value, wide)))
            return self.value()
        finally:
            for name, old in kept.items():
                self._set(name, old)

    def _tensor(self, name: str) -> torch.Tensor:
        path, _, last = self.places.get(name, name).rpartition(".")
        tensor: torch.Tensor = getattr(self.module.get_submodule(path), last)
        return tensor

    def _set(self, name: str, value: torch.Tensor) -> None:
        tensor = self._tensor(name)
        tensor.data.copy_(value.to(tensor.device))


def replay_call(module: torch.nn.Module, holder: str, call: Call, boundary: str, places: Mapping[str, str]) -> Replay:
    """Return the replay that runs one submodule again.

    Args:
        module: the whole model, in float64.
        holder: name of the submodule that runs: the one at the boundary, or one around it.
        call: of the submodule.
        boundary: where the value is read.
        places: of the replay.
    """

    def value() -> Array:
        import torch

        from convert.numerics.lift_torch import lifted

        args, kwargs = copy.deepcopy((call.args, call.kwargs))  # the call may write into a cache among them
        for submodule, attributes in call.state.items():
            vars(submodule).update(copy.deepcopy(dict(attributes)))
        with torch.no_grad(), lifted(), observe(module, [boundary]) as seen:
            module.get_submodule(holder)(*args, **kwargs)
        return tensor_in_float64(seen[boundary])

    return Replay(module, value, places)
