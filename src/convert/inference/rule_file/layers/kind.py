"""Say which kind of layer the tensors of a module are: by the type of the module, or by what the two programs do with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.drafting.like.target import TargetModule
from convert.inference.derivation import Role, Tensor
from convert.inference.facts import SPACE_AND_CHANNELS
from convert.inference.rule_file.layers.rule import ATTENTION, CONVOLUTIONS, NORMS, TRANSPOSED
from convert.inference.rule_file.layers.sources import (
    Shapes,
    has_one_channel_of_leaf,
    has_one_number_for_each_row,
    is_joined,
    is_part_of_leaf,
    is_permuted,
    joins_axes,
)
from convert.layers.norm.layer_rms import UNSCALED
from convert.layers.shared_keys import ASK

WORDS = {
    Role.PRODUCT: "linear",
    Role.CONVOLUTION: "conv",
    Role.LOOKUP: "embedding",
}


def kind_of(
    module: TargetModule,
    tensors: Mapping[str, Tensor],
    said: Mapping[str, Any],
    first: Tensor,
    leaves: Shapes,
    others: Sequence[Tensor],
) -> str:
    """Return the kind of a rule.

    Args:
        module: of the target.
        tensors: its tensors that the rule makes, by their role, the weight first.
        said: facts about them.
        first: the weight as the target has it.
        leaves: their shapes.
        others: all tensors that leaves are the source of.
    """
    kind = _kind_by_use(module, tensors, said)
    if kind == "linear" and _is_kernel_of_taps(module, first, leaves):
        return "conv"
    if kind == "embedding" and _is_no_table(first, leaves, others):
        return "parameter"
    if kind in CONVOLUTIONS and (
        said.get(SPACE_AND_CHANNELS)
        or _has_taps_of_other_axes(first, leaves)
        or has_one_channel_of_leaf(first, leaves)
        or any(is_part_of_leaf(tensor, leaves) for tensor in tensors.values())
    ):
        return "parameter"  # a rule for a convolution takes whole leaves, and each axis has one meaning
    vectors = (tensor for tensor in (first, *tensors.values()) if len(tensor.shape) == 1)
    if kind in NORMS and any(_has_no_leaf_alone(tensor, leaves) for tensor in vectors):
        return "parameter"  # a rule for a norm takes whole leaves, one for each tensor, and joins no axes
    alone = not module.kind_name and first.name.removeprefix(f"{module.name}.") != "weight"
    if kind == "linear" and alone and is_part_of_leaf(first, leaves):
        return "parameter"  # a rule names the modules that have the parts of a leaf, and these have one
    return kind


def _has_no_leaf_alone(vector: Tensor, leaves: Shapes) -> bool:
    """Whether the numbers of a norm are those of several axes of a leaf, such as heads, a part of one, or those of several leaves.

    A norm of each channel can be that of several layers which stand side by side in the other program.
    """
    several = len({part.leaf for part in vector.parts}) > 1
    return several or joins_axes(vector, leaves) or is_part_of_leaf(vector, leaves)


def _is_kernel_of_taps(module: TargetModule, first: Tensor, leaves: Shapes) -> bool:
    """Whether one leaf has the axes of a convolution's kernel, and the source multiplies shifted data by each of its taps."""
    spatial, strides = first.shape[2:], first.parts[0].evidence.target.settings.get("stride")
    if module.kind_name != "conv" or len(first.parts) != 1 or not isinstance(strides, list):
        return False
    overlap = any(taps > step for taps, step in zip(spatial, strides, strict=True))
    return overlap and len(leaves[first.parts[0].leaf]) == len(first.shape)


def _has_taps_of_other_axes(first: Tensor, leaves: Shapes) -> bool:
    """Whether a kernel is one over other axes of space in the source: one tap over a line of each row for an image, or an image of a film."""
    leaf, evidence = leaves.get(first.parts[0].leaf, ()), first.parts[0].evidence
    own = evidence.source.settings.get("window_strides") if evidence.source is not None else None
    strides = evidence.target.settings.get("stride")
    if isinstance(own, list) and isinstance(strides, list) and len(own) != len(strides):
        return True
    return set(first.shape[2:]) == {1} and 2 < len(leaf) != len(first.shape)


def _is_no_table(tensor: Tensor, leaves: Shapes, others: Sequence[Tensor]) -> bool:
    """Whether a table is stored as width x entries, as a vector, as several tables in one leaf, or as a part of such a leaf."""
    if is_permuted(tensor, leaves) or is_joined(tensor, leaves) or has_one_number_for_each_row(tensor, leaves):
        return True
    return is_part_of_leaf(tensor, leaves) and any(
        part.leaf == own.leaf and not np.isin(part.positions, own.positions).any()
        for other in others
        for part in other.parts
        for own in tensor.parts
    )


def _kind_by_use(module: TargetModule, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> str:
    if module.kind_name == ATTENTION:
        return "linear" if "weight" in tensors else "parameter"
    first = next(iter(tensors.values()))
    role, site = first.parts[0].evidence.role, first.parts[0].evidence.source
    product = role is Role.CONVOLUTION and site is not None and site.operation == "dot_general"
    if product and module.kind_name in ("conv", ""):
        return "linear"
    if module.kind_name == TRANSPOSED and (product or role is Role.PRODUCT):
        return (
            "parameter"  # the taps stand beside the channels that it gives; a subclass may multiply the kernel itself
        )
    if module.kind_name:
        return module.kind_name
    if role in (Role.PRODUCT, Role.LOOKUP) and len(first.shape) != 2:  # blocks, experts, a number for each class
        return "parameter"
    norm = role is Role.SCALE and "epsilon" in said and "moments" not in said  # of RevIN they are over time
    if norm and len(first.shape) == 1:  # a rule for a norm has no other axes
        return "layer_norm" if "bias" in tensors else "rms_norm"
    if role is Role.CONVOLUTION and (len(first.shape) < 3 or first.parts[0].evidence.target.operand == 0):
        return "parameter"  # the code gives it the axes of space, or data is the kernel
    if role is Role.CONVOLUTION and said.get("transposed"):
        return TRANSPOSED
    return WORDS.get(role, "parameter")


def norm_keys(
    said: Mapping[str, Any], configured: Mapping[str, Any], *, scaled: bool
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the keys of a norm, with a scale of the source or without, and those of its target: read off the programs, or configured in the target."""
    epsilon = said.get("epsilon", configured.get("epsilon"))
    keys = [
        ("multiplies_by", str(said.get("multiplies_by", "scale")) if scaled else UNSCALED),
        ("epsilon", _number(epsilon) if isinstance(epsilon, float) else ASK),
    ]
    keys += [("num_groups", str(configured["num_groups"]))] if "num_groups" in configured else []
    target = [("multiplies_by", "1+weight")] if said.get("weight") == "1+weight" else []
    return tuple(keys), tuple(target)


def _number(value: float) -> str:
    """Return a number as people write it: 1e-6."""
    return re.sub(r"e-0*", "e-", f"{value:g}")
