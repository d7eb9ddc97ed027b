"""How every reference loads a PyTorch module and feeds it."""

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
    """An input, array or tensor of any dtype and on any device, as a tensor on this one."""
    import torch

    return (value if isinstance(value, torch.Tensor) else torch.as_tensor(np.array(value))).to(device)


def config_of(plan: Plan) -> dict[str, Any]:
    """What transformers' configuration class takes: ``config.json`` without what says who loads it, and in what dtype.

    Raises:
        UnavailableError: a fact that it needs is not known.
    """
    try:
        config = plan.config
    except PlanError as error:
        facts = error.findings[0].data.get("facts", ())
        if not facts:
            raise
        wanted = " ".join(f"--set {name}=..." for name in facts)
        raise UnavailableError(
            f"the target's configuration needs {', '.join(facts)}, which neither the tree nor the file says: {wanted}"
        ) from error
    return {key: value for key, value in (config or {}).items() if key not in UNUSED}


def class_of(plan: Plan) -> tuple[str, str]:
    """transformers' class and its `model_type`: those of ``config.json``, or the rules' where it names none.

    Loading needs no `architectures`: who loads the model names the class.
    """
    written, meant = plan.config or {}, plan.rules.targets[plan.target].config
    names = written.get("architectures") or meant["architectures"]
    return str(names[0]), str(written.get("model_type") or meant["model_type"])


def load(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """The module in eval mode with these weights and in their dtype; buffers that are not saved keep theirs.

    Raises:
        RuntimeError: PyTorch's, the weights are not those of this module.
    """
    module.load_state_dict(dict(weights), strict=True, assign=True)
    return module.requires_grad_(False).eval()


@contextmanager
def ready(module: torch.nn.Module) -> Iterator[tuple[torch.device, torch.dtype]]:
    """Where and in what dtype the module wants its inputs.

    Within this context, what upstream's code makes without naming a dtype (statistics, caches) has the weights' dtype:
    upstream has no other way to run in bfloat16 or float64.
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
