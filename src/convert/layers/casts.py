"""The dtype that a tensor is written in, and the casts around its arithmetic."""

from __future__ import annotations

from convert.core.ops import Cast, Op, is_float, widens
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec
from convert.layers.base import Rule


def target_dtype(rule: Rule, spec: TensorSpec, asked: str | None) -> str:
    """What a leaf is written in: the rule's dtype, the user's for floats, else its own or the narrowest that holds it."""
    wanted = rule.dtype or (asked if is_float(spec.dtype) else None) or spec.dtype
    if SAFETENSORS_TAGS[wanted] is not None:
        return wanted
    if wanted == rule.dtype:
        raise ValueError(f"safetensors cannot hold {wanted}; choose another `dtype:`")
    for wider in ("uint8", "int8", "float16", "bfloat16", "float32"):
        if widens(wanted, wider):
            return wider
    raise ValueError(f"safetensors cannot hold {wanted}")


def computing(compute: tuple[Op, ...], spec: TensorSpec, dtype: str) -> tuple[Op, ...]:
    """Arithmetic in float32 or wider between two casts; casts that change nothing are left out."""
    if not compute:
        return (Cast(dtype),) if dtype != spec.dtype else ()
    if not is_float(spec.dtype):
        raise ValueError(f"{', '.join(map(str, compute))} needs floating-point values")
    wide = "float64" if spec.dtype == "float64" else "float32"
    before = (Cast(wide),) if spec.dtype != wide else ()
    after = (Cast(dtype),) if dtype != wide else ()
    return (*before, *compute, *after)


def losses(sources: list[str], target: str, computed: bool) -> str:
    for source in sources:
        wide = ("float64" if source == "float64" else "float32") if computed else source
        if not widens(wide, target):
            return f"rounded from {wide} to {target}"
    return ""
