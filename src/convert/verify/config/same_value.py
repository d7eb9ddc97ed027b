"""Decide whether two values of a setting mean the same to the target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from convert.layers.shared_keys import ACTIVATION_NAMES

# setting of transformers 5.23 -> the value that it has where it is missing (``modeling_rope_utils.RotaryEmbeddingConfigMixin``)
MISSING: Mapping[str, Any] = {"rope_type": "default", "partial_rotary_factor": 1.0}
GATED = "gated-"  # T5's `feed_forward_proj`


def same(name: str, one: Any, two: Any) -> bool:
    """Whether two values are equal: activations by their meaning, numbers to the precision of float32."""
    last = name.rsplit(".", 1)[-1]
    one, two = (MISSING.get(last) if value is None else value for value in (one, two))
    if isinstance(one, str) and isinstance(two, str):
        both_gated_or_neither = one.startswith(GATED) == two.startswith(GATED) or last == "activation"
        return one == two or (_names_activation(last) and both_gated_or_neither and canonical(one) == canonical(two))
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(same("", a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, int | float) and isinstance(two, int | float):
        return math.isclose(one, two, rel_tol=1e-7)
    return bool(one == two)


def _names_activation(key: str) -> bool:
    return "act" in key or key == "feed_forward_proj"


def canonical(activation: Any) -> Any:
    """Return the name of an activation in the rules."""
    return ACTIVATION_NAMES.get(activation, activation) if isinstance(activation, str) else activation


def shown(value: Any) -> str:
    """Format a value for a message."""
    if isinstance(value, float):
        return f"{value:g}" if math.isclose(float(f"{value:g}"), value, rel_tol=1e-7) else repr(value)
    return str(value)
