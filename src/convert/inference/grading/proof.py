"""The proof of a derivation: fresh weights and inputs through the module as it is, loaded with ``strict=True``, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.inference.candidates.candidate import COMPUTE
from convert.inference.derivation import Arithmetic, Tensor
from convert.inference.forms.weight_norms import lengths
from convert.numerics.magnitude import relative_error
from convert.numerics.real_numbers import as_real
from convert.programs.program import Program
from convert.references.user_reference import require_masks

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
COUNTER = "num_batches_tracked"  # the rules of BatchNorm write it
Masks = Callable[[Mapping[str, Array]], Mapping[str, Array]]


def weights(tensors: Sequence[Tensor], source: Program) -> dict[str, Array]:
    """Return the target's tensors, computed from the leaves of another run of the source; NaN where nothing is known."""
    found = {}
    for tensor in tensors:
        flat = np.full(int(np.prod(tensor.shape)), np.nan)
        for part in tensor.parts:
            if part.arithmetic is Arithmetic.CONSTANT:
                flat[part.elements] = part.factor
            elif part.arithmetic is Arithmetic.OWN:
                flat[part.elements] = part.values
            elif part.rows_of:
                continue  # of what is found now
            elif part.low_rank is not None:
                leaves = {name: source.parameters[name].array for name in part.leaves}
                flat[part.elements] = part.low_rank.value(leaves).ravel()[part.positions]
            elif part.arithmetic is Arithmetic.COMPUTED:
                site = part.evidence.source
                assert site is not None and site.operand is not None
                operand = source.operations[site.index].operands[site.operand]
                flat[part.elements] = operand.array.ravel()[part.positions]
            else:
                leaf = source.parameters[part.leaf].array.ravel()
                flat[part.elements] = part.factor * COMPUTE[part.arithmetic](leaf[part.positions])
        for name in (tensor.name, *tensor.also):
            found[name] = flat.reshape(tensor.shape)
    for tensor in tensors:
        for part in tensor.parts:
            if part.rows_of in found:
                made = lengths(found[part.rows_of], tensor.shape)
                found |= dict.fromkeys((tensor.name, *tensor.also), made)
    return found


def error(
    module: torch.nn.Module,
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    masks: Masks,
    tensors: Sequence[Tensor],
    source: Program,
) -> float:
    """Return the largest difference of an output between a run of the source and the module with the tensors' weights.

    It is relative to the output's largest value.

    Args:
        masks: inputs -> where each output counts.

    Raises:
        UserCodeError: a mask does not fit its output, or excludes all of it.
    """
    return error_of(module, run, masks, weights(tensors, source), source)


def error_of(
    module: torch.nn.Module,
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    masks: Masks,
    state: Mapping[str, Array],
    source: Program,
) -> float:
    """Return the same for weights of the module; what they lack stays as the module has it.

    Raises:
        UserCodeError: a mask does not fit its output, or excludes all of it.
    """
    found = counted(masks, source, made_by(module, run, state, source))
    own = counted(masks, source, {name: value.array for name, value in source.outputs.items()})
    return max((relative_error(found[name], want) for name, want in own.items()), default=0.0)


def counted(masks: Masks, source: Program, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the elements of the outputs of a run that count; all of one that has not the shape of the source's.

    Raises:
        UserCodeError: a mask does not fit its output, or excludes all of it.
    """
    shapes = {name: value.array.shape for name, value in source.outputs.items()}
    counts = dict(require_masks(masks({name: value.given for name, value in source.inputs.items()}), shapes))
    fits = {name: arrays[name].shape == shape for name, shape in shapes.items()}
    return {name: _counted(arrays[name], counts.get(name) if fits[name] else None) for name in shapes}


def outputs(
    module: torch.nn.Module,
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    masks: Masks,
    state: Mapping[str, Array],
    source: Program,
) -> Array:
    """Return the elements of the outputs that count, in one row, for weights of the module and the inputs of a run of the source."""
    found = made_by(module, run, state, source)
    counts = dict(require_masks(masks({name: v.given for name, v in source.inputs.items()}), {}))
    return np.concatenate([_counted(found[name], counts.get(name)).ravel() for name in source.outputs])


def slopes(
    module: torch.nn.Module,
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    masks: Masks,
    state: Mapping[str, Array],
    source: Program,
    direction: Array,
) -> Mapping[str, Array] | None:
    """Return how `outputs`, projected on a direction, change with each element of the weights; None where PyTorch does not say it."""
    import torch

    from convert.numerics.lift_torch import lifted

    own = loaded(module, state)
    tensors = {name: x for name, x in own.state_dict(keep_vars=True).items() if x.is_floating_point()}
    counts = dict(require_masks(masks({name: v.given for name, v in source.inputs.items()}), {}))
    try:
        with lifted(), torch.enable_grad():
            for x in tensors.values():
                x.requires_grad_(True)
            made = run(own, given(source))
            rows = [_counted(made[name], counts.get(name)).reshape(-1) for name in source.outputs]
            total = torch.cat(rows) @ torch.as_tensor(direction)
            found = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
    except RuntimeError:  # no graph, or an operation without a derivative
        return None
    zeros = (np.zeros(tuple(x.shape)) for x in tensors.values())
    return {
        name: zero if slope is None else slope.numpy() for name, slope, zero in zip(tensors, found, zeros, strict=True)
    }


def made_by(
    module: torch.nn.Module,
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    state: Mapping[str, Array],
    source: Program,
) -> dict[str, Array]:
    """Return the outputs of the module for weights of it and the inputs of a run of the source, by name."""
    import torch

    from convert.numerics.lift_torch import lifted
    from convert.programs.torch_aliases import array_of

    own = loaded(module, state)
    with lifted(), torch.no_grad():
        return {name: as_real(array_of(value)) for name, value in run(own, given(source)).items()}


def whole_numbers(module: torch.nn.Module) -> dict[str, Array]:
    """Return the integers and truth values that a module saves, which every proof leaves as they are; without counters of BatchNorm."""
    from convert.programs.torch_module_state import is_inexact

    saved = module.state_dict()
    stored = dict(module.named_buffers(remove_duplicate=False)) | dict(module.named_parameters(remove_duplicate=False))
    return {
        name: x.detach().cpu().numpy().copy()
        for name, x in stored.items()
        if name in saved and not (is_inexact(x) or name.endswith(COUNTER))
    }


def loaded(module: torch.nn.Module, state: Mapping[str, Array]) -> torch.nn.Module:
    """Return a copy of a module in float64 with these weights; what they lack stays as the module has it."""
    import torch

    from convert.numerics.lift_torch import lifted
    from convert.programs.torch_module_state import as_tensor_of, copy_of, wide

    own = copy_of(module)
    own._apply(wide).eval()  # lifting refuses to copy storages
    with lifted(), torch.no_grad():
        full = {name: as_tensor_of(x, state[name]) if name in state else x for name, x in own.state_dict().items()}
        own.load_state_dict(full, strict=True)
    return own


def given(source: Program) -> dict[str, torch.Tensor]:
    """Return the inputs of a run of the source, for the module."""
    import torch

    return {name: torch.as_tensor(np.array(value.given)) for name, value in source.inputs.items()}


def _counted(array: Any, mask: Array | None) -> Any:
    """Return the elements that count, of an array or a tensor; `mask` has the leading axes of the array."""
    if mask is None:
        return array
    return array[np.broadcast_to(mask.reshape(*mask.shape, *[1] * (array.ndim - mask.ndim)), array.shape).copy()]
