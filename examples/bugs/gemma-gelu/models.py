"""Gemma with the exact GeLU, as google/gemma_pytorch had it before #37, for `--reference models:wrong`; and as it should be."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from convert import Plan, Reference
from convert.references.gemma import text


def right(plan: Plan) -> Reference:
    """JAX's Gemma, and transformers'."""
    return text.reference(plan)


def wrong(plan: Plan) -> Reference:
    """The same, with ``F.gelu(gate)`` in place of ``F.gelu(gate, approximate="tanh")``."""
    reference = text.reference(plan)

    def build(weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        module = reference.build(weights)
        for layer in module.model.layers:
            layer.mlp.act_fn = torch.nn.GELU()
        return module

    return replace(reference, build=build)
