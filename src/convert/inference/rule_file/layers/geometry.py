"""What a convolution was given: dimension numbers, padding, strides, dilation, groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.inference.derivation import Tensor
from convert.layers.conv.padding import Geometry, torch_padding, torch_transposed_padding

CAUSAL = "CAUSAL"  # flax's word
PADDED = "padded"  # what the target's module pads, where other code does the rest
SPATIAL = {1: "W", 2: "HW", 3: "DHW"}


def geometry_of(tensor: Tensor, said: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the dimension numbers, padding, strides, ... of a convolution as text, so that equal ones are one rule."""
    source = tensor.parts[0].evidence.source
    numbers = {"dimension_numbers": source.settings.get("dimension_numbers")} if source is not None else {}
    keys = ("padding", "strides", "dilation", "groups")
    found = numbers | {k: said[k] for k in keys if k in said}
    if "padding" in said and _is_causal(tensor.shape[2:], said):
        found["padding"] = CAUSAL
    if rest := _padded_elsewhere(tensor, said):
        found[PADDED] = rest
    return tuple((key, str(value)) for key, value in found.items())


def _is_causal(kernel: Sequence[int], said: Mapping[str, Any]) -> bool:
    """Whether the source pads one axis in front, by all that the kernel covers but one."""
    if len(kernel) != 1 or said.get("transposed") or kernel[0] == 1:
        return False
    return [_numbers(pair) for pair in said["padding"]] == [((kernel[0] - 1) * int(said["dilation"][0]), 0)]


def _padded_elsewhere(tensor: Tensor, said: Mapping[str, Any]) -> list[int]:
    """Return the padding of the target's module, if the code around it pads or cuts, so that it is none that follows from the source's."""
    settings = tensor.parts[0].evidence.target.settings
    own, kernel = list(settings.get("padding") or []), tensor.shape[2:]
    names = ("padding", "strides", "dilation")
    if len(own) != len(kernel) or not all(name in said for name in names):
        return []
    pads, strides, dilation = (tuple(map(_numbers, said[name])) for name in names)
    geometry = Geometry(pads, strides, dilation)
    if said.get("transposed"):
        made = torch_transposed_padding(geometry, kernel)
        fits = (own, list(settings.get("output_padding") or [])) == (made.allowed[0], list(made.output_padding or ()))
    else:
        fits = not any(own) or own in torch_padding(geometry, kernel, SPATIAL[len(kernel)]).allowed
    return [] if fits else own


def _numbers(value: Any) -> Any:
    return tuple(map(int, value)) if isinstance(value, list | tuple) else int(value)
