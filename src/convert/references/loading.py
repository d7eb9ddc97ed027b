"""Build a PyTorch module from a plan and weights, and feed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import PlanError, UnavailableError
from convert.planning.plan import Plan

if TYPE_CHECKING:
    import torch

UNUSED = ("architectures", "model_type", "dtype", "torch_dtype", "transformers_version")


def on(device: torch.device, value: Any) -> torch.Tensor:
    """Return an array or tensor as a tensor on this device."""
    import torch

    return (value if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))).to(device)


def config_of(plan: Plan) -> dict[str, Any]:
    """Return the arguments of transformers' configuration class: ``config.json`` without class names and dtypes.

    Raises:
        UnavailableError: a fact that it needs is unknown.
    """
    try:
        config = plan.config
    except PlanError as error:
        if error.code != "fact-missing":
            raise
        raise UnavailableError(*error.findings) from error
    return {key: value for key, value in (config or {}).items() if key not in UNUSED}


def class_of(plan: Plan) -> tuple[str, str]:
    """Return transformers' class and its `model_type`: those of ``config.json``, or of the rules where it has none.

    A ``config.json`` without `architectures` loads, too: the caller of `from_pretrained` names the class.
    """
    written, meant = plan.config or {}, plan.rules.targets[plan.target].config
    names = written.get("architectures") or meant["architectures"]
    return str(names[0]), str(written.get("model_type") or meant["model_type"])


def load(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Load these weights with strict=True, in their dtype, and return the module in eval mode; other buffers are unchanged.

    Raises:
        RuntimeError: the weights do not belong to this module.
    """
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.requires_grad_(False).eval()


@contextmanager
def ready(module: torch.nn.Module) -> Iterator[tuple[torch.device, torch.dtype]]:
    """Yield the device and dtype of the module's weights, and make that dtype the default within this context.

    Upstream's code creates tensors without a dtype (statistics, caches), and has no other way to run in bfloat16 or float64.
    """
    import torch

    weight = next(module.parameters())
    before = torch.get_default_dtype()
    torch.set_default_dtype(weight.dtype)
    try:
        with torch.no_grad():
            yield weight.device, weight.dtype
    finally:
        torch.set_default_dtype(before)
