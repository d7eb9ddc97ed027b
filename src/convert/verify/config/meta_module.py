"""Build the target's module with weights that take no memory, and read what it is configured to compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convert.core.tensor_spec import is_float
from convert.core.user_code import OF_THE_PROGRAM
from convert.references.protocol import Reference
from convert.writing.written import Written

if TYPE_CHECKING:
    import torch

SEED = 0


def shared_memory_state(written: Written) -> dict[str, torch.Tensor]:
    """Make float32 weights with the names and shapes of the file, whose rows share memory.

    Matrices are random and scaled as at initialisation. Each row is the previous row, shifted by one, so a model of any size
    takes a few megabytes. Vectors are around 1, so that no norm returns zeros.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    state = {}
    for name, spec in written.specs.items():
        shape = spec.shape
        if not is_float(spec.dtype):
            state[name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
        elif len(shape) < 2:
            state[name] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            width = math.prod(shape[1:])
            numbers = torch.randn(shape[0] + width, generator=generator) / math.sqrt(width)
            inner = [math.prod(shape[k + 1 :]) for k in range(1, len(shape))]
            state[name] = numbers.as_strided(shape, (1, *inner))
    return state


def facts_of(written: Written, reference: Reference) -> tuple[Mapping[str, Mapping[str, Any]], str]:
    """Return `Reference.facts` of a module with the weights of `shared_memory_state`, and the error if there is none.

    The module is built on the meta device first, which takes no memory. A module that copies its tensors, or that needs a
    computed buffer, is built on the CPU.
    """
    try:
        import torch
    except ImportError as error:
        return {}, f"{error.name} is not installed"
    from convert.references.module_facts import facts

    problem = ""
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                module = reference.build(shared_memory_state(written) if device == "cpu" else _on_cpu(written))
            if any(parameter.is_meta for parameter in module.parameters()):
                continue
            return reference.facts(module) or facts(module), ""  # without `Reference.facts`: those of its norms
        except OF_THE_PROGRAM:
            raise
        except BaseException as error:  # noqa: BLE001 - upstream code, or the user's, rejects a configuration with any exception
            problem = " ".join(str(error).split())[:300]
    return {}, problem or "it has parameters without values"


def _on_cpu(written: Written) -> dict[str, torch.Tensor]:
    import torch

    with torch.device("cpu"):
        return shared_memory_state(written)
