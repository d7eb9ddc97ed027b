"""The keys of a convolution: its dimension numbers, the letters of its kernel, padding, strides and groups."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Mapping, Sequence

from convert.inference.rule_file.layers.geometry import CAUSAL, SPATIAL
from convert.inference.rule_file.layers.layout import REVERSED
from convert.inference.rule_file.layers.rule import SCALE, TRANSPOSED, LayerRule, NoWordsError
from convert.inference.rule_file.printing.letters import Named

AXES = "weight_norm.axes"
SPEC = re.compile(r"(lhs|rhs|out)_spec=(\([0-9, ]+\))")


def convolution_keys(layer: LayerRule, named: Named, stacked: Collection[int]) -> list[tuple[str, str]]:
    """Return (dimension numbers, letters of the kernel), then the other keys with their values.

    Raises:
        NoWordsError: the kernel of the source is no plain convolution's.
    """
    said = dict(layer.geometry)
    layout = layer.main[0].layout
    kernel = [axis for axis in range(len(layout.leaf_shape)) if axis not in stacked and (axis, 0) not in layout.fixed]
    forward = _is_of_forward_convolution(layer)
    printed = _numbers(said.get("dimension_numbers", ""), len(kernel))
    numbers = _of_leaf(printed, kernel, _roles(layer, forward)) if printed else _numbers_of_layout(layer, kernel)
    roles = _of_kernel(numbers)
    found = []
    for axis, role in zip(kernel, roles, strict=True):
        of = layout.made_of(axis)
        if len(of) > 1:
            raise NoWordsError(f"axis {axis} of the kernel is composite")
        size = layout.leaf_shape[axis]
        letter = named.take("width" if role in "OI" else "kernel", size) if size > 1 else named.take("one", 1)
        named.of[axis, 0] = letter
        found.append(letter)
    keys = [(numbers, "".join(found)), *([("transpose_kernel", "true")] if forward else [])]
    for key, name in (("padding", "padding"), ("strides", "strides"), ("dilation", "dilation")):
        if key in said and not _plain(key, said[key]):
            keys.append((name, "VALID" if key == "padding" and _is_valid(layer, said[key]) else said[key]))
    if any(key == SCALE for key, _ in layer.sources):
        first = (layout.groups or ((),))[0]
        keys.append((AXES, named.of[first[0].of, 0]))
    if (
        said.get("groups", "1") != "1" and "I" in roles
    ):  # without this axis, or with one element in it, every channel is a group
        sizes = {role: layout.leaf_shape[axis] for axis, role in zip(kernel, roles, strict=True)}
        every = layer.kind_name != TRANSPOSED and (sizes["I"], str(sizes["O"])) == (1, said["groups"])
        keys.append(("feature_group_count", found[roles.index("O")] if every else said["groups"]))
    return keys


def _is_of_forward_convolution(layer: LayerRule) -> bool:
    """Whether a transposed convolution has the kernel of the convolution whose gradient it is, which JAX then flips itself.

    Raises:
        NoWordsError: the kernel is flipped where it may not be.
    """
    spatial = (layer.main[0].layout.groups or ())[2:]  # channels in the reversed order are parts in another order
    flipped = {axis.order == REVERSED for group in spatial for axis in group}
    if layer.kind_name != TRANSPOSED:
        if True in flipped:
            raise NoWordsError("the kernel is flipped, and its convolution is not transposed")
        return False
    if len(flipped) > 1:
        raise NoWordsError("the kernel is flipped along some of its axes, and not along the others")
    return flipped == {False}


def _roles(layer: LayerRule, forward: bool) -> dict[int, str]:
    """Return the letters that the axes of the leaf have by where they lie in the target's kernel; an axis of one element has none.

    Args:
        forward: whether the letters are those of the convolution whose gradient this is.
    """
    groups = layer.main[0].layout.groups or ()
    channels = "OI" if layer.kind_name != TRANSPOSED or forward else "IO"
    letters = channels + SPATIAL.get(len(groups) - 2, "")
    return {group[0].of: letter for letter, group in zip(letters, groups, strict=False) if len(group) == 1}


def _of_leaf(numbers: str, kernel: Sequence[int], told: Mapping[int, str]) -> str:
    """Return dimension numbers with the letters of the kernel as the leaf has its axes, where the source's code moves them.

    Args:
        kernel: the axes of the leaf.
        told: letters by axis, as far as they are known.

    Raises:
        NoWordsError: the two programs have the axes of space in another order.
    """
    printed = _of_kernel(numbers)
    if all(told.get(axis, letter) == letter for axis, letter in zip(kernel, printed, strict=True)):
        return numbers
    rest = iter([letter for letter in printed if letter not in told.values()])
    moved = "".join(told.get(axis) or next(rest) for axis in kernel)
    if [x for x in moved if x not in "OI"] != [x for x in printed if x not in "OI"]:
        raise NoWordsError("the source's kernel has its axes of space in another order than the target's")
    return numbers.replace(printed, moved)


def _of_kernel(numbers: str) -> str:
    """Return the letters of the kernel in dimension numbers."""
    return numbers.split(",")[1].split("->")[0]


def _is_valid(layer: LayerRule, padding: str) -> bool:
    """Whether nothing is padded; a transposed convolution that is VALID pads what its kernel covers."""
    return layer.kind_name != TRANSPOSED and padding != CAUSAL and not re.search("[1-9]", padding)


def _numbers(text: str, rank: int) -> str:
    """Return the dimension numbers that JAX printed, as rules write them; empty if the kernel has another rank."""
    specs = {name: ast.literal_eval(spec) for name, spec in SPEC.findall(text)}
    if set(specs) != {"lhs", "rhs", "out"} or len(specs["rhs"]) != rank or rank - 2 not in SPATIAL:
        return ""
    spatial = SPATIAL[rank - 2]
    given, made = (_spelled(specs[side], f"NC{spatial}") for side in ("lhs", "out"))
    return f"{given},{_spelled(specs['rhs'], f'OI{spatial}')}->{made}"


def _numbers_of_layout(layer: LayerRule, kernel: Sequence[int]) -> str:
    """Return the dimension numbers of a kernel that the source's code multiplies with shifted values itself.

    Raises:
        NoWordsError: the axes of the kernel cannot be told.
    """
    groups = layer.main[0].layout.groups or ()
    count = len(groups) - 2
    if count not in SPATIAL or any(len(group) > 1 for group in groups) or layer.kind_name != "conv":
        raise NoWordsError("the source's convolution has a kernel that is no leaf as it is stored")
    roles = {group[0].of: f"OI{SPATIAL[count]}"[k] for k, group in enumerate(groups) if group}
    if set(roles) != set(kernel) or "O" not in roles.values():
        raise NoWordsError("the axes of the source's kernel cannot be told")
    values = f"N{SPATIAL[count]}C"
    return f"{values},{''.join(roles[axis] for axis in kernel)}->{values}"


def _spelled(spec: Sequence[int], roles: str) -> str:
    """Return the letters of an operand: `spec` has the position of each role."""
    found = [""] * len(spec)
    for role, position in zip(roles, spec, strict=True):
        found[position] = role
    return "".join(found)


def _plain(key: str, value: str) -> bool:
    """Whether a rule may leave the key out: ones are what it stands for."""
    return key != "padding" and set(re.findall(r"[0-9]+", value)) == {"1"}
