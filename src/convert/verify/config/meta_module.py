"""The target's module with weights that take no memory: enough to ask what it is configured to compute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convert.core.ops import is_float
from convert.verify.written import Written

if TYPE_CHECKING:
    import torch

    from convert.references.protocol import Reference

SEED = 0


def hollow_state(written: Written) -> dict[str, torch.Tensor]:
    """Weights of the file's names and shapes, in float32, whose rows lie over each other in memory.

    Matrices are random and scaled as at initialisation (each row is the one before, moved by one), so that a model of any
    size has numbers to compute with and takes a few megabytes. Vectors are around 1, so that every norm lets something pass.
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
    """`Reference.facts` of a module that is built from weights as in `hollow_state`, and why it gave none if so.

    The module is made on the meta device first, so that it never exists in full; one that cannot be asked there, because
    it does not take over the tensors that it is given or needs a buffer of its own, is made in memory.
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
                module = reference.build(hollow_state(written) if device == "cpu" else _outside(written))
            if any(parameter.is_meta for parameter in module.parameters()):
                continue
            return reference.facts(module) or facts(module), ""  # those of its norms, when the reference tells none
        except Exception as error:  # noqa: BLE001 - upstream's code says in its own ways that a configuration is wrong
            problem = " ".join(str(error).split())[:300]
    return {}, problem or "it has parameters without values"


def _outside(written: Written) -> dict[str, torch.Tensor]:
    import torch

    with torch.device("cpu"):
        return hollow_state(written)
