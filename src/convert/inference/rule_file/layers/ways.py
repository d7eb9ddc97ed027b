"""Say how the elements of a tensor are computed from single ones of leaves: a number that is added, a factor, a sum of leaves with different axes."""

from __future__ import annotations

from collections.abc import Mapping

from convert.inference.derivation import Arithmetic, Tensor
from convert.inference.rule_file.layers.rule import ADDED, NORMS, TERM_AXES, NoWordsError

NUMBERS = {Arithmetic.SAME: 0, Arithmetic.ONE_PLUS: 1, Arithmetic.MINUS_ONE: -1}  # that the source adds to a leaf
ROLES = {
    "weight": "from",
    "bias": "bias",
    "running_mean": "mean",
    "running_var": "var",
    "weight_norm": "weight_norm",
}  # of a tensor -> the rule's key
Keys = tuple[tuple[str, str], ...]


def ways(tensor: Tensor) -> set[tuple[float, float]]:
    """Return how the elements of a tensor are computed from single ones of leaves: the number that is added, and the factor."""
    return {(NUMBERS[p.arithmetic] + p.number, p.factor) for p in tensor.parts if p.arithmetic in NUMBERS}


def has_other_ways(bias: Tensor, weight: Tensor) -> bool:
    """Whether a bias is computed in several ways, or carries another factor than the weight; one number is added to it in its layer's rule."""
    if any(part.term_axes for part in bias.parts):  # only a `parameter` names their axes
        return True
    of_bias, factors = ways(bias), {factor for _, factor in ways(weight)}
    if len(of_bias) > 1:
        return len({number for number, _ in of_bias}) > 1
    return bool(of_bias) and factors != {factor for _, factor in of_bias} and factors != set()


def numbers(kind: str, tensors: Mapping[str, Tensor]) -> Keys:
    """Return the numbers that the source adds to the leaves of a rule, but to the scale of a norm, whose factor says it.

    Raises:
        NoWordsError: a rule of this kind adds none.
    """
    found = []
    for role, tensor in tensors.items():
        number = max((number for number, _ in ways(tensor)), key=abs, default=0)
        if not number or (kind in NORMS and role == "weight"):
            continue
        key = "from" if kind == "parameter" else ROLES.get(role, "from")
        if key != "bias" and kind != "parameter":
            raise NoWordsError("its elements are those of a leaf plus a number")
        found.append((f"{key}{ADDED}", f"{number:.12g}"))
    return tuple(found)


def term_axes(kind: str, tensor: Tensor) -> Keys:
    """Return which axes of a sum each of its leaves has, where they differ.

    Raises:
        NoWordsError: only some parts of the tensor are such a sum, or a rule of this kind names no axes of its leaves.
    """
    found = {part.term_axes for part in tensor.parts}
    if found == {()}:
        return ()
    if len(found) > 1 or kind != "parameter":
        raise NoWordsError("its elements are sums of leaves with different axes")
    return ((TERM_AXES, ",".join(" ".join(map(str, places)) for places in found.pop())),)
