"""The record of a PyTorch module with drawn weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.draws import Draws
from convert.programs.program import Program

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
PATHS = 4  # so many further weights are tried where some lead past parameters of the module


def recorded(
    module: torch.nn.Module, run: Run, given: Mapping[str, Array], known: Mapping[str, Array] | None = None
) -> Program:
    """Return the record of a module; where its values choose the path, of the weights whose path reads most parameters.

    The first weights may send no row to an expert, whose operations are then missing.

    Parameters that are not known, or NaN where they are not, are drawn: the module may have been made for weights that are loaded later, and hold any numbers.
    Its own are taken where no drawn ones let it run. Its buffers and frozen parameters keep their own: it may have computed them.
    """
    found = drawn(module, run, given, known or {}, 0)
    for seed in range(1, PATHS + 1):
        if not (found.path_taken and _unread(found)):
            break
        other = drawn(module, run, given, known or {}, seed)
        found = min(found, other, key=lambda program: len(_unread(program)))
    return found


def drawn(
    module: torch.nn.Module, run: Run, given: Mapping[str, Array], known: Mapping[str, Array], seed: int
) -> Program:
    """Return the record of a module with the weights of a seed, or with its own where it does not run with these."""
    from convert.programs.record_torch import record_torch
    from convert.programs.torch_module_state import frozen, with_weights

    def program(weights: Mapping[str, Array]) -> Program:
        in_part = {
            name: np.where(np.isnan(known[name]), x, known[name])
            for name, x in weights.items()
            if name in known and known[name].shape == np.shape(x)  # a complex one is drawn as a whole
        }
        with with_weights(module, {**weights, **whole, **in_part}):
            return record_torch(module, run, given)

    whole = {name: x for name, x in known.items() if not np.isnan(x).any()}
    unknown = module.state_dict().keys() - whole.keys() - frozen(module)
    parameters = {name: x for name, x in module.named_parameters() if name in unknown}
    shapes = {name: tuple(x.shape) for name, x in parameters.items()}
    try:
        made: Program = Draws(shapes, {name for name, x in parameters.items() if x.is_complex()}).run(seed, program)
    except ConvertError:
        return program({})
    return made


def _unread(program: Program) -> list[str]:
    """Return the parameters that no operation reads."""
    read = {value for operation in program.operations for value in operation.operands} | {*program.outputs.values()}
    return [name for name, value in program.parameters.items() if value not in read]
