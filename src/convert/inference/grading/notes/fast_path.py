"""Whether PyTorch's fast path of a transformer's layers computes what the module says. The proof runs without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.inference.grading.proof import Masks, counted, given, loaded
from convert.numerics.magnitude import relative_error
from convert.programs.program import Program
from convert.programs.torch_aliases import array_of

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
OFF = "torch.backends.mha.set_fastpath_enabled(False)"


def notes(
    module: torch.nn.Module,
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    masks: Masks,
    state: Mapping[str, Array],
    source: Program,
    allowed: float,
) -> tuple[str, ...]:
    """Return a note where the fast path gives other outputs, for weights of the module and the inputs of a run of the source.

    Without gradients, `torch.nn.TransformerEncoderLayer` runs `aten::_transformer_encoder_layer_fwd`, which has only two activations:
    it computes the erf form for each `torch.nn.GELU` (torch/nn/modules/transformer.py, PyTorch 2.13).

    Args:
        masks: inputs -> where each output counts: the fast path gives zeros at padded positions.
        allowed: relative error within which outputs are the same.
    """
    import torch

    fused = (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention)
    if not any(isinstance(part, fused) for part in module.modules()):
        return ()
    before, made = torch.backends.mha.get_fastpath_enabled(), []
    own, tensors = loaded(module, state), given(source)
    try:
        for fast in (True, False):
            torch.backends.mha.set_fastpath_enabled(fast)
            with torch.no_grad():
                made.append({name: array_of(value) for name, value in run(own, tensors).items()})
    except RuntimeError:  # its code has casts of its own, and does not run in float64
        return ()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    fast_outputs, outputs = (counted(masks, source, arrays) for arrays in made)
    error = max((relative_error(fast_outputs[name], outputs[name]) for name in outputs), default=0.0)
    if error <= allowed:
        return ()
    return (
        f"PyTorch's fast path, which runs without gradients, gives other outputs than the module's own code (relative error {error:.1e}), "
        f"and the proof has none: switch it off, `{OFF}`",
    )
