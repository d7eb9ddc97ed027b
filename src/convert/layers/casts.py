"""The dtype that a tensor is written in, and the casts before and after its arithmetic."""

from __future__ import annotations

from convert.core.ops import Op
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, is_float, widens
from convert.core.value_ops import Cast
from convert.layers.base import Rule


def target_dtype(rule: Rule, spec: TensorSpec, requested: str | None) -> str:
    """Return the dtype that a leaf is written in.

    It is the rule's dtype; for floats the one that the user requested; otherwise the leaf's, or the narrowest that holds it.

    Raises:
        ValueError: safetensors cannot hold it.
    """
    wanted = rule.dtype or (requested if is_float(spec.dtype) else None) or spec.dtype
    if SAFETENSORS_TAGS[wanted] is not None:
        return wanted
    if wanted == rule.dtype:
        raise ValueError(f"safetensors cannot hold {wanted}; choose another `dtype:`")
    for wider in ("uint8", "int8", "float16", "bfloat16", "float32"):
        if widens(wanted, wider):
            return wider
    raise ValueError(f"safetensors cannot hold {wanted}")


def computing(compute: tuple[Op, ...], spec: TensorSpec, dtype: str) -> tuple[Op, ...]:
    """Return the arithmetic between two casts, so that it is computed in float32 or wider.

    Raises:
        ValueError: the values are not floats.
    """
    if not compute:
        return (Cast(dtype),) if dtype != spec.dtype else ()
    if not is_float(spec.dtype):
        raise ValueError(f"{', '.join(map(str, compute))} needs floating-point values")
    wide = "float64" if spec.dtype == "float64" else "float32"
    before = (Cast(wide),) if spec.dtype != wide else ()
    after = (Cast(dtype),) if dtype != wide else ()
    return (*before, *compute, *after)


def losses(sources: list[str], target: str, computed: bool) -> str:
    """Say what the cast to the target dtype loses; empty: nothing."""
    for source in sources:
        wide = ("float64" if source == "float64" else "float32") if computed else source
        if not widens(wide, target):
            return f"rounded from {wide} to {target}"
    return ""
