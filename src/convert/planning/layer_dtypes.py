"""Weights of dtypes that no layer multiplies by: whole numbers, truth values, float8 without its scales, and complex numbers in a model whose code has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from convert.checkpoints.source import Source
from convert.core.findings import Finding
from convert.core.tensor_spec import is_float
from convert.layers import KINDS
from convert.layers.base import Step
from convert.rules.library import is_shipped

COMPLEX = "complex"
NARROW = ("float8_", "float6_", "float4_")  # of a byte or less: such weights are multiplied by scales


def weights_of_other_dtypes(steps: Sequence[Step], source: Source) -> Iterator[Finding]:
    """Find the first weight of each rule whose values are not those that a layer computes with.

    A plain parameter may have any dtype in a user's model; of the shipped ones, a rule whose parameter holds whole numbers gives it a
    `dtype`. A user's model may have complex layers, too, and scales of its own.
    """
    narrow = {name: leaf.spec.dtype for name, leaf in source.leaves.items() if leaf.spec.dtype.startswith(NARROW)}
    if not narrow and all(map(is_float, {step.spec.dtype for step in steps})):
        return
    seen = set()
    for step in steps:
        dtype = next((narrow[part.leaf] for part in step.parts if part.leaf in narrow), step.spec.dtype)
        in_float8, is_complex = dtype.startswith(NARROW), dtype.startswith(COMPLEX)
        if (is_float(dtype) and not in_float8) or step.rule in seen:
            continue
        own = KINDS[step.kind_name].any_dtype or is_complex or in_float8
        if own and not is_shipped(step.rule.file):
            continue
        leaf = next((part.leaf for part in step.parts if part.leaf in source.leaves), None)
        if leaf is None:
            continue
        seen.add(step.rule)
        more = "; whole numbers may be quantised weights, whose scales would be lost"
        more = "; weights in float8 have scales, which the tree lacks" if in_float8 else "" if is_complex else more
        yield Finding(
            "dtype-mismatch",
            f"{leaf} becomes {step.name}, which a layer computes with",
            rule=step.rule.line_only,
            path=leaf,
            expected="real numbers" + (" in a dtype of 16 bits or more" if in_float8 else ""),
            got=str(source.leaves[leaf].spec),
            fix=f"convert a checkpoint that holds the values that the model computes with{more}",
        )
