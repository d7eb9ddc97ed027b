"""Build and run the PyTorch side, which is transformers' for all models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.loading import class_of, config_of, load, on, ready
from convert.references.plan_facts import not_installed

if TYPE_CHECKING:
    import torch

INSTALL = "pip install 'transformers>=5.23'"
TEXT_LENGTH = 29  # tokens of the reference's texts, unless the model has fewer positions
PADDING = 4  # tokens at the end of the second text
# Settings of how the same function is computed. The first refuses float64, the second some lengths.
DISABLED: Mapping[str, Any] = {"reorder_and_upcast_attn": False, "chunk_size_feed_forward": 0}


def text_mask(length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return the attention mask of two texts, of which the second ends in padding."""
    mask = np.ones((2, length), np.int32)
    mask[1, -PADDING:] = 0
    return mask


def build(plan: Plan, tied: Mapping[str, str], weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Build transformers' module of the plan's configuration with these weights.

    Args:
        tied: names in its state_dict of weights that are equal to others -> the names of those.

    Raises:
        UnavailableError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise not_installed("transformers", error, INSTALL) from error
    name, model_type = class_of(plan)
    config = transformers.AutoConfig.for_model(model_type, **config_of(plan))
    config._attn_implementation = "eager"
    for setting, value in DISABLED.items():
        if hasattr(config, setting):
            setattr(config, setting, value)
    module = getattr(transformers, name)(config)
    copies = {key: weights[of] for key, of in tied.items() if key in module.state_dict() and key not in weights}
    return load(module, {**copies, **weights})


def run(outputs: tuple[str, ...], extra: Mapping[str, Any], module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run the module and return its outputs by name.

    Args:
        extra: further arguments of the call.
    """
    with ready(module) as (device, _):
        given = {name: on(device, value) for name, value in inputs.items()}
        values = module(**{name: x if x.is_floating_point() else x.long() for name, x in given.items()}, **extra)
    return {name: values[name] for name in outputs}
