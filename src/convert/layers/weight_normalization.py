"""Weights that are computed from others at every call: weight norm and spectral norm.

Sources of the formulas: flax 0.12.8 ``linen/normalization.py`` (WeightNorm, SpectralNorm; nnx has the same): feature axes of a weight
norm are the last one unless the source says otherwise, a spectral norm makes a matrix of all axes against the last one, of the bias, too, where it has several axes, and takes
`n_steps` steps of the power iteration from the stored u at every call, at inference, too. Equinox 0.13 ``nn/_weight_norm.py`` and
``nn/_spectral_norm.py``: at inference it takes no step, and divides by u w v of both stored vectors, w the matrix of the first axis
against all others. torch 2.13 ``torch.nn.utils.parametrizations.weight_norm`` (original0 is g, original1 is v) and
``torch.nn.utils.weight_norm`` (weight_g, weight_v).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from convert.core.fields import INTEGER, Choice, Either, Key, Record, Scalar
from convert.core.path_pattern import Pattern
from convert.layers.shared_keys import PATTERN, parse_axes, parse_epsilon
from convert.layers.weight_transforms import PARAMETRIZATIONS

if TYPE_CHECKING:
    from convert.layers.base import Rule, TargetLayer

EPSILON = 1e-12  # flax's default, in both
V = "spectral_norm_v"  # role of the second vector's leaf
BIAS_U = "spectral_norm_bias"  # role of the leaf that holds the bias's vector u
_FEATURES = Key(
    Scalar(str, "axis letters such as NH", parse_axes),
    "letters of the weight's axes for which this leaf has numbers, where they are not the output's: of several output axes flax takes the "
    "last that is stored",
)
NORMALIZED: Mapping[str, Key] = {
    "weight_norm": Key(
        Either(
            PATTERN,
            Record({"scale": Key(PATTERN, "path of the scale", required=True), "axes": _FEATURES}, "a weight norm"),
        ),
        "path of the scale of a flax or Equinox WeightNorm around this layer: the source computes with scale * kernel / |kernel|, the "
        "norm taken for each output; or {scale: path, axes: H}. It is folded into the weight, unless the target has a `parametrization`",
    ),
    "spectral_norm": Key(
        Either(
            PATTERN,
            Record(
                {
                    "u": Key(PATTERN, "path of the vector u, of a number for each output", required=True),
                    "v": Key(PATTERN, "path of the vector v, where the source divides by u w v as both are stored (Equinox, at inference)"),
                    "steps": Key(INTEGER, "steps of the power iteration that the source takes from u at every call (flax: n_steps, 1)"),
                    "bias": Key(PATTERN, "path of the vector u of the bias, which flax normalises, too, where it has two axes or more"),
                    "axes": _FEATURES,
                },
                "a spectral norm",
            ),
        ),
        "path of the vector u of a flax SpectralNorm around this layer: the source takes one more step of the power iteration "
        "from u at every call, and divides by the sigma that it finds, not by the stored one; or {u: path, steps: 3}; or {u: path, v: path} "
        "of an Equinox SpectralNorm, which takes none at inference. It is folded into the weight",
    ),
    "normalization_epsilon": Key(Scalar((float, int), "a number", parse_epsilon), f"what weight_norm or spectral_norm adds to a squared norm (default: flax's {EPSILON:g}; Equinox's weight norm adds 0)"),
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
        paths: role -> path of each leaf beside the weight's.
        axes: letters of the weight's axes that the second leaf has; empty: its outputs.
        steps: of a power iteration; None: the rule does not say, and one is meant.
    """

    role: str
    epsilon: float
    paths: Mapping[str, Pattern]
    axes: str = ""
    steps: int | None = None


def read_normalized(values: Mapping[str, Any]) -> Normalized | None:
    """What the keys of a rule say; None when they say nothing.

    Raises:
        ValueError: both at once, or an epsilon of neither.
    """
    said = [key for key in ("weight_norm", "spectral_norm") if key in values]
    if len(said) > 1:
        raise ValueError("a weight has `weight_norm` or `spectral_norm`, not both")
    if not said and "normalization_epsilon" in values:
        raise ValueError("`normalization_epsilon` goes with `weight_norm` or `spectral_norm`")
    if not said:
        return None
    role, epsilon = said[0], float(values.get("normalization_epsilon", EPSILON))
    more = (
        values[role] if isinstance(values[role], dict) else {"u" if role == "spectral_norm" else "scale": values[role]}
    )
    paths = {role: more["u" if role == "spectral_norm" else "scale"]}
    paths |= {of: more[key] for key, of in (("v", V), ("bias", BIAS_U)) if key in more}
    steps = more.get("steps")
    if "bias" in more and ("v" in more or "bias" not in values):
        said_of = "`v`, whose source leaves the bias as it is" if "v" in more else "no `bias:`, the path of the bias"
        raise ValueError(
            f"a spectral norm has `bias:`, the path of the bias's u, and {said_of}; leave one of the two out"
        )
    if "v" in more and steps is not None:
        raise ValueError(
            "a spectral norm with `v` takes no steps: it divides by u w v of the two stored vectors; leave `steps` out"
        )
    if steps is not None and steps < 1:
        raise ValueError(f"a power iteration takes one step or more, not {steps}; without any the source has `v`, too")
    return Normalized(role, epsilon, paths, more.get("axes", ""), 0 if "v" in more else steps)


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
    role = rule.normalized.role
    for layer in rule.targets.values():
        if len(layer.path.groups) != len(rule.path.groups) or layer.computes is not None:
            raise ValueError(f"a weight with `{role}` is neither fused, nor split, nor one of an einsum in the target")
    numbers = getattr(rule.kind, "numbers", None)
    if numbers is not None and len(numbers.outputs) > 1:
        raise ValueError(f"`{role}` is known for kernels with I, and that of {numbers.text} has C")
    for letters, outputs in _letters(rule.kind):
        if strange := [x for x in rule.normalized.axes if x not in letters]:
            raise ValueError(f"`{role}` has the axis {strange[0]}, and the weight the axes {' '.join(letters)}")
        apart = rule.normalized.axes not in ("", outputs) or len(outputs) != 1
        if apart and any(layer.parametrization for layer in rule.targets.values()):
            raise ValueError(
                "torch's weight norm has a scale for each row, g * v / |v|, the norm of the row; the source's are not those of "
                f"one output axis ({' '.join(outputs)}). Leave `parametrization` out, and the scale is folded into the weight"
            )


def _letters(kind: Any) -> list[tuple[str, str]]:
    """The letters of the weight's axes, as stored, and those of its outputs, for each variant: of a convolution or a Linear."""
    if hasattr(kind, "numbers"):
        return [(kind.axes, kind.letter("O"))]
    return [(equation.weight, equation.outputs) for equation in kind.equations.values()]


def features(rule: Rule, letters: str, sizes: tuple[int, ...], own: tuple[int, ...]) -> str:
    """Letters of the weight's axes for which a leaf beside it has numbers, in the order of that leaf.

    Args:
        letters, sizes: of the weight's axes, as stored.
        own: shape of the leaf, stacked axes left out.

    Raises:
        ValueError: they are not told, or do not fit; the message is the bare fact.
    """
    assert rule.normalized is not None
    said, size = rule.normalized.axes, dict(zip(letters, sizes, strict=True))
    if said:
        return said
    if own == ():
        return ""  # one number: the norm is that of the whole weight (flax: feature_axes=None)
    outputs = next((outputs for known, outputs in _letters(rule.kind) if known == letters), "")
    if len(outputs) == 1:
        return outputs
    count = 1 if rule.normalized.role == "spectral_norm" else len(own)
    found = letters[-count:]
    if V in rule.normalized.paths or (rule.normalized.role == "weight_norm" and own != tuple(size[x] for x in found)):
        key = "u: ..., v: ..." if V in rule.normalized.paths else "scale: ..."
        shown = ", ".join(f"{x}={size[x]}" for x in letters)
        raise ValueError(
            f"its shape does not tell which axes of the weight it has numbers for ({shown}); say it: "
            f"`{rule.normalized.role}: {{{key}, axes: {outputs}}}`"
        )
    return found


def kept(rule: Rule, layer: TargetLayer) -> bool:
    """Whether the target keeps the two tensors apart."""
    return rule.normalized is not None and layer.parametrization is not None


def facts(rule: Rule, layer: TargetLayer) -> dict[str, Any]:
    """What a plan and a header say of it."""
    if rule.normalized is None:
        return {}
    word = "kept" if kept(rule, layer) else "folded"
    return {rule.normalized.role: word, "normalization_epsilon": rule.normalized.epsilon}
