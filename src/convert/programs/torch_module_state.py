"""Let a module run in float64, and leave it as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from convert.programs.torch_aliases import Geometry


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the floating and complex parameters and buffers that the module saves, by name, in the order of its state_dict."""
    own = _registered(module)
    return {name: own[name] for name in module.state_dict() if name in own and is_inexact(own[name])}


def is_inexact(x: torch.Tensor) -> bool:
    """Whether a tensor has floating or complex numbers."""
    return x.is_floating_point() or x.is_complex()


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return a floating tensor in float64 and a complex one of twice that; another one, or one that is, as it is."""
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def tied_names(state: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the names of tensors that have an earlier name too, each with the first one."""
    first: dict[Any, str] = {}
    names = {name: first.setdefault(_elements(x), name) for name, x in state.items()}
    return {name: other for name, other in names.items() if name != other}


def frozen(module: torch.nn.Module) -> set[str]:
    """Return the names of parameters that take no gradient among others that do, as a table of sines that is kept as a parameter."""
    own = dict(module.named_parameters(remove_duplicate=False))
    names = {name for name, x in own.items() if not x.requires_grad}
    return names if len(names) < len(own) else set()


def copy_of(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module, also of one that keeps what it has computed of its parameters, such as a pruned weight."""
    kept = (x for part in module.modules() for x in vars(part).values() if isinstance(x, torch.Tensor))
    memo = {id(x): x.detach().clone() for x in kept if not x.is_leaf}  # torch refuses to copy these
    return copy.deepcopy(module, memo)


@contextmanager
def in_float64(module: torch.nn.Module) -> Iterator[None]:
    """Give the module copies of its tensors within this context, floating ones in float64.

    Tensors that share elements share those of the copies.

    Afterwards it has its own again, and the attributes that it had.
    """
    restore = [_kept(part) for part in module.modules()]
    before = {id(x): (x, x.data) for x in [*_registered(module).values(), *_plain(module)]}
    copies: dict[Any, torch.Tensor] = {}
    try:
        for x, data in before.values():
            key = data.untyped_storage()._cdata, data.dtype
            if key not in copies:
                copies[key] = _copy(data)
            x.data = copies[key].as_strided(data.size(), data.stride(), data.storage_offset())
        yield
    finally:
        for x, data in before.values():
            x.data = data
        for again in restore:
            again()


@contextmanager
def with_weights(module: torch.nn.Module, weights: Mapping[str, Any]) -> Iterator[None]:
    """Give the module other weights by name within this context, in float64; tensors that share elements go on sharing them."""
    with in_float64(module), torch.no_grad():
        own = _registered(module)
        for name, array in weights.items():
            own[name].data.copy_(as_tensor_of(own[name], array))
        yield


def as_tensor_of(own: torch.Tensor, array: Any) -> torch.Tensor:
    """Return numbers for a tensor of a module; for a complex one they may be given by their parts, along a further last axis."""
    made = torch.as_tensor(array)
    return torch.view_as_complex(made.contiguous()) if own.is_complex() and not made.is_complex() else made


def _copy(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of the storage of a tensor, as one axis."""
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
    made = wide(whole)
    return whole.clone() if made is whole else made


def _registered(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def _plain(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that modules have as attributes, without having registered them."""
    for part in module.modules():
        for value in vars(part).values():
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            yield from (x for x in inner if isinstance(x, torch.Tensor) and not x.is_meta)


def _elements(x: torch.Tensor) -> Any:
    return x.untyped_storage()._cdata, Geometry.of(x)


def _kept(module: torch.nn.Module) -> Callable[[], None]:
    """Return what gives a module the attributes that it has now, and lists and mappings among them what they hold."""
    attributes = dict(vars(module))
    held = [(value, value.copy()) for value in attributes.values() if isinstance(value, list | dict | set)]

    def restore() -> None:
        vars(module).clear()
        vars(module).update(attributes)
        for value, was in held:
            value.clear()
            value.extend(was) if isinstance(value, list) else value.update(was)

    return restore
