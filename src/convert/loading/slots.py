"""Where the tensors of a module lie: which names share one tensor, which have no memory yet, and how a piece gets there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.loading.arrays import as_array, as_tensor, spec_of

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Slot:
    """A parameter or buffer of a module.

    Attributes:
        names: its names in the state_dict; several if it is tied.
        places: each module that has it, and its name there.
        tensor: as the module has it, perhaps on the meta device.
        spec: shape and dtype.
    """

    names: tuple[str, ...]
    places: tuple[tuple[torch.nn.Module, str], ...] = field(repr=False)
    tensor: torch.Tensor = field(repr=False)
    spec: TensorSpec


def find_slots(module: torch.nn.Module) -> tuple[list[Slot], list[Finding]]:
    """List the tensors of a module's state_dict, each once, and those that cannot be filled."""
    state = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    findings, named = [], {id(tensor) for tensor in state.values()}
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items()):
            if tensor is None:
                continue
            if (inner, name) not in places.setdefault(id(tensor), []):
                places[id(tensor)].append((inner, name))
            if tensor.is_meta and id(tensor) not in named:
                findings.append(
                    Finding(
                        "module-tensor-unsupported",
                        "this buffer is on the meta device, and no state_dict holds it: its constructor computes it",
                        path=f"{prefix}.{name}" if prefix else name,
                        expected="a buffer with values",
                        got="a buffer without values",
                        fix="put only parameters on the meta device when the module is built, as accelerate's init_empty_weights does",
                    )
                )
    slots = []
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        names = tuple(name for name, other in state.items() if other is tensor)
        why = _unsupported(tensor, id(tensor) in places)
        spec = None if why else spec_of(tensor)
        if spec is None:
            findings.append(
                Finding(
                    "module-tensor-unsupported",
                    path=names[0],
                    expected="a dense torch.Tensor of a dtype that NumPy has, which is a parameter or buffer of the module",
                    got=why or str(tensor.dtype),
                    fix="load into a plain module, then quantise or distribute it; or write a file with `convert` and use the "
                    "module's own loader",
                )
            )
        else:
            slots.append(Slot(names, tuple(places[id(tensor)]), tensor, spec))
    return slots, findings


def _unsupported(tensor: torch.Tensor, is_member: bool) -> str:
    if not is_member:
        return "a tensor that state_dict() computes"
    if isinstance(tensor, torch.nn.UninitializedParameter | torch.nn.UninitializedBuffer):
        return "a parameter without a shape, of a lazy module"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(tensor).__name__}"
    return "" if tensor.layout == torch.strided else f"layout {tensor.layout}"


def materialise(slots: Sequence[Slot], device: torch.device) -> dict[int, torch.Tensor]:
    """Give memory to the tensors on the meta device, in every module that has them.

    Returns:
        id of each slot's tensor -> the tensor with memory.
    """
    made: dict[int, torch.Tensor] = {}
    for slot in slots:
        tensor = slot.tensor
        if tensor.is_meta:
            tensor = torch.empty_like(tensor, device=device)
            if isinstance(slot.tensor, torch.nn.Parameter):
                tensor = torch.nn.Parameter(tensor, requires_grad=slot.tensor.requires_grad)
                tensor.__dict__.update(slot.tensor.__dict__)
            for module, name in slot.places:
                members: dict[str, Any] = module.__dict__["_parameters" if name in module._parameters else "_buffers"]
                members[name] = tensor
        made[id(slot.tensor)] = tensor
    return made


class Destination:
    """Memory of a tensor as an array, and how a piece that is written to this array gets into the tensor.

    A contiguous tensor of the CPU is written directly. A contiguous tensor of another device gets each piece through a strided view;
    the array then only has addresses, and its pages are never touched. A tensor with gaps or another order of axes is copied when it is complete.
    """

    def __init__(self, tensor: torch.Tensor, *, direct: bool | None = None) -> None:
        self._tensor = tensor.detach()
        self._direct = (tensor.device.type == "cpu" if direct is None else direct) and tensor.is_contiguous()
        self._strided = not self._direct and tensor.is_contiguous()
        if self._direct:
            self.array = as_array(self._tensor)
        else:
            name = str(tensor.dtype).removeprefix("torch.")
            self.array = np.empty(tuple(tensor.shape), numpy_dtype(name))

    def put(self, region: Array, values: Array) -> None:
        """Write values to a region of the array, which may have its axes in any order and direction."""
        if not self._strided:
            region[...] = values
            return
        back = tuple(axis for axis, stride in enumerate(region.strides) if stride < 0)
        region, values = np.flip(region, back), np.flip(values, back)  # torch has no negative strides
        first = _address(region) - _address(self.array)
        strides = [stride // region.itemsize for stride in region.strides]
        at = self._tensor.storage_offset() + first // region.itemsize
        view = self._tensor.as_strided(region.shape, strides, at)
        view.copy_(as_tensor(np.array(values, order="C", ndmin=values.ndim)))

    def complete(self) -> None:
        """Copy the array, where the pieces did not get into the tensor themselves."""
        if not self._direct and not self._strided:
            self._tensor.copy_(as_tensor(self.array))


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def by_name(slots: Sequence[Slot]) -> Mapping[str, Slot]:
    """Map each name of the state_dict to its slot."""
    return dict(_names(slots))


def _names(slots: Sequence[Slot]) -> Iterator[tuple[str, Slot]]:
    for slot in slots:
        for name in slot.names:
            yield name, slot
