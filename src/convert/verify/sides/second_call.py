"""Call the PyTorch model again: what it keeps from a call, such as a recurrent state, must not change the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.findings import Finding
from convert.numerics.compare import difference
from convert.numerics.precision import torch_pinned
from convert.references.protocol import Reference
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_torch import input_tensors, observed

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
NAME = "state kept from call to call"


def second_call(
    reference: Reference,
    module: torch.nn.Module,
    evidence: Evidence,
    first: Mapping[str, Array],
    allowed: Mapping[str, float],
    device: str,
) -> Finding | None:
    """Return what a second call with the same inputs gives other than the first one; None if it gives the same.

    Args:
        module: in native precision, after its first call.
        first: outputs of the first call.
        allowed: relative error of each of them.
    """
    import torch

    def called() -> Mapping[str, Array]:
        with torch_pinned(), torch.no_grad():
            return observed(reference, module, input_tensors(evidence.inputs, evidence.precision, device), [])

    again = called()
    for name, limit in allowed.items():
        if again[name].shape != first[name].shape:
            got = f"the shape {list(again[name].shape)} after {list(first[name].shape)}"
        else:
            one, two = (evidence.pick(name, values[name]) for values in (again, first))
            error = difference(one, two, precision=evidence.precision, mask=evidence.masks.get(name)).relative
            if error <= limit:
                continue
            got = f"a relative difference of {error:.1e}"
        before = _kept(module)
        called()
        after = _kept(module)
        changed = sorted(at for at in after if at not in before or not _same(before[at], after[at]))
        what = (
            f"it keeps {', '.join(f'`{at}`' for at in changed)}"
            if changed
            else "it keeps something outside of its attributes"
        )
        return Finding(
            "run-not-deterministic",
            f"the PyTorch model computes something else when it is called again: {what}",
            path=name,
            expected="the outputs of the first call, as the inputs are the same",
            got=got,
            fix=f"start each call from the first state{f': reset `{changed[0]}` there' if changed else ''}",
            data={"diagnosis": NAME, "attributes": changed},
        )
    return None


def _kept(module: torch.nn.Module) -> dict[str, Any]:
    """Return copies of what the modules hold beside their parameters: numbers and tensors, by path."""
    from torch.nn import Module

    from convert.numerics.lift_torch import tensors_in

    own, found = vars(Module()).keys(), dict[str, Any]()
    for path, part in module.named_modules():
        held = {
            **{name: value for name, value in vars(part).items() if name not in own},
            **dict(part.named_buffers(recurse=False)),
        }
        for name, value in held.items():
            copies = [tensor.detach().clone() for tensor in tensors_in(value)]
            if copies or isinstance(value, int | float):
                found[f"{path}.{name}".removeprefix(".")] = copies or value
    return found


def _same(one: Any, other: Any) -> bool:
    import torch

    if not (isinstance(one, list) and isinstance(other, list)):
        return bool(one == other)
    return len(one) == len(other) and all(map(torch.equal, one, other))
