"""Weights that are computed from others at every call: weight norm and spectral norm.

Sources of the formulas: flax 0.12.8 ``linen/normalization.py`` (WeightNorm, SpectralNorm; nnx has the same); torch 2.13
``torch.nn.utils.parametrizations.weight_norm`` (original0 is g, original1 is v) and ``torch.nn.utils.weight_norm`` (weight_g, weight_v).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.fields import Choice, Key, Scalar
from convert.folds import Operand, SpectralNorm, WeightNorm
from convert.kinds.base import PATTERN, parse_epsilon
from convert.kinds.conventions import PARAMETRIZATIONS
from convert.ops import Op

if TYPE_CHECKING:
    from convert.kinds.base import Rule, TargetLayer

EPSILON = 1e-12  # flax's default, in both
NORMALIZED: Mapping[str, Key] = {
    "weight_norm": Key(
        PATTERN,
        "path of the scale of a flax WeightNorm around this layer: the source computes with scale * kernel / |kernel|, the "
        "norm taken for each output. It is folded into the weight, unless the target has a `parametrization`",
    ),
    "spectral_norm": Key(
        PATTERN,
        "path of the vector u of a flax SpectralNorm around this layer: the source takes one more step of the power iteration "
        "from u at every call, and divides by the sigma that it finds, not by the stored one. It is folded into the weight",
    ),
    "normalized_epsilon": Key(Scalar((float, int), "a number", parse_epsilon), f"what weight_norm or spectral_norm adds to a squared norm (default: flax's {EPSILON:g})"),
}  # fmt: skip
PARAMETRIZATION = Key(
    Choice(tuple(PARAMETRIZATIONS)),
    "the target keeps a weight norm's two tensors: weight_norm (torch.nn.utils.parametrizations: original0 and original1), "
    "old_weight_norm (torch.nn.utils.weight_norm: weight_g and weight_v)",
)


@dataclass(frozen=True)
class Normalized:
    """What the source does to the weight at every call.

    Attributes:
        role: ``weight_norm`` or ``spectral_norm``, and the role of the second leaf.
        epsilon: added to a squared norm.
    """

    role: str
    epsilon: float

    def op(self, operand: Operand) -> Op:
        """What folds it into a weight whose axis 0 is the output."""
        kind = WeightNorm if self.role == "weight_norm" else SpectralNorm
        return kind(operand, self.epsilon)


def read_normalized(values: Mapping[str, Any]) -> Normalized | None:
    """What the keys of a rule say; None when they say nothing.

    Raises:
        ValueError: both at once, or an epsilon of neither.
    """
    said = [key for key in ("weight_norm", "spectral_norm") if key in values]
    if len(said) > 1:
        raise ValueError("a weight has `weight_norm` or `spectral_norm`, not both")
    if not said and "normalized_epsilon" in values:
        raise ValueError("`normalized_epsilon` goes with `weight_norm` or `spectral_norm`")
    return Normalized(said[0], float(values.get("normalized_epsilon", EPSILON))) if said else None


def check_normalized(rule: Rule) -> None:
    """Whether the targets of a rule can hold its weight.

    Raises:
        ValueError: they cannot; the message is the bare fact.
    """
    for layer in rule.targets.values():
        if layer.parametrization and (rule.normalized is None or rule.normalized.role != "weight_norm"):
            raise ValueError(
                "the target keeps a weight norm's scale, and the rule has no `weight_norm:`, the path of it"
            )
    if rule.normalized is None:
        return
    for layer in rule.targets.values():
        if len(layer.path.groups) != len(rule.path.groups) or layer.computes is not None:
            raise ValueError(
                f"a weight with `{rule.normalized.role}` is neither fused, nor split, nor one of an einsum in the target"
            )
    equations = getattr(rule.kind, "equations", {})
    if any(len(equation.outputs) != 1 for equation in equations.values()):
        raise ValueError(f"`{rule.normalized.role}` is known for weights with one output axis")  # fmt: skip


def kept(rule: Rule, layer: TargetLayer) -> bool:
    """Whether the target keeps the two tensors apart."""
    return rule.normalized is not None and layer.parametrization is not None


def facts(rule: Rule, layer: TargetLayer) -> dict[str, Any]:
    """What a plan and a header say of it."""
    if rule.normalized is None:
        return {}
    word = "kept" if kept(rule, layer) else "folded"
    return {rule.normalized.role: word, "normalized_epsilon": rule.normalized.epsilon}
