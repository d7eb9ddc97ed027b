"""Optional keys of a rule that describe its weight: prescaled_by, rope, flattened, weight_norm, spectral_norm.

For each key: its type, the function that reads it, and its entry in the schema of rule files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from convert.core.fields import INTEGER, Choice, Either, Key, ListOf, MapOf, Record, Scalar
from convert.core.path_pattern import Pattern
from convert.layers.shared_keys import PATTERN, parse_axes, parse_epsilon

# RoPE rotates pairs of a head's H features. interleaved: (0, 1), (2, 3), ...; half-split: (0, H/2), (1, H/2 + 1), ...
PAIRS = ("interleaved", "half-split")
# How torch keeps a weight norm: names in the module, of the scale (role weight_norm) and of the direction (role weight).
PARAMETRIZATIONS: Mapping[str, Mapping[str, str]] = {
    "weight_norm": {"weight_norm": "parametrizations.weight.original0", "weight": "parametrizations.weight.original1"},
    "old_weight_norm": {"weight_norm": "weight_g", "weight": "weight_v"},
}
_FACTOR = re.compile(r"(?P<minus>-)?(?P<over>1/)?(?:sqrt\((?P<root>[^()]+)\)|(?P<plain>[^()/^]+))(?P<square>\^2)?")


@dataclass(frozen=True)
class Factor:
    """A factor that the source has multiplied into a weight, such as ``1/sqrt(H)``.

    Attributes:
        text: as the rule has it.
        of: the letter of a size, ``$name`` of a fact, or a number.
        power: exponent of `of`: 1, 1/2 or 2.
        is_inverse: whether one is divided by the result.
        is_negative: whether the result has the other sign.
        parts: of a leaf that is a sum of parts: those with the factor, counted from 0; None: the whole leaf.
    """

    text: str
    of: str | float
    power: float
    is_inverse: bool
    parts: tuple[int, ...] | None = None
    is_negative: bool = False

    @property
    def fact(self) -> str | None:
        """Name of the fact that it refers to."""
        return self.of[1:] if isinstance(self.of, str) and self.of.startswith("$") else None

    def value(self, sizes: Mapping[str, int], facts: Mapping[str, Any] = MappingProxyType({})) -> float:
        """Return the number.

        Raises:
            ValueError: no leaf gives its letter a size, or its fact is no number above 0.
        """
        if self.fact is not None:
            given = facts.get(self.fact)
            if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < math.inf:
                raise ValueError(
                    f"the weight is prescaled by {self.text}, and {self.fact} is {given!r}; give a number above 0 with --set {self.fact}=..."
                )
            number = float(given)
        elif isinstance(self.of, str):
            if self.of not in sizes:
                raise ValueError(f"the weight is prescaled by {self.text}, and no leaf gives {self.of} a size")
            number = float(sizes[self.of])
        else:
            number = self.of
        if not number and (self.is_inverse or self.power < 0):
            raise ValueError(f"the weight is prescaled by {self.text}, and {self.of} is 0")
        number = math.pow(number, self.power)
        number = 1 / number if self.is_inverse else number
        return -number if self.is_negative else number


def parse_factor(text: str | int | float) -> Factor:
    """Parse ``1/sqrt(H)``, ``sqrt(D)``, ``1/8``, ``0.125``, ``-1`` or ``1/$fact^2``.

    Raises:
        ValueError: not a factor other than 0.
    """
    bare = re.sub(r"\s", "", str(text))
    found = _FACTOR.fullmatch(bare)
    inside = (found["root"] or found["plain"]) if found else ""
    of: str | float | None = inside if len(inside) == 1 and inside.isascii() and inside.isalpha() else None
    if of is None and re.fullmatch(r"\$[A-Za-z_]\w*", inside):
        of = inside
    if of is None and re.fullmatch(r"[0-9]+(\.[0-9]+)?(e-?[0-9]+)?", inside) and 0 < float(inside) < math.inf:
        of = float(inside)
    if found is None or of is None or (found["root"] and found["square"]):
        raise ValueError(f"expected a factor other than 0 such as 1/sqrt(H), sqrt(D), 0.125 or -1, not {text!r}")
    power = 0.5 if found["root"] else 2 if found["square"] else 1
    return Factor(bare, of, power, found["over"] is not None, is_negative=found["minus"] is not None)


@dataclass(frozen=True)
class Rope:
    """A head's features, whose pairs RoPE rotates after this layer.

    Attributes:
        axis: letter of the axis.
        pairs: one of `PAIRS`.
        parts: of an axis that is a sum, the parts that RoPE rotates, counted from 0; None: all that have the axis.
        leaf_axes: letters of the layer's output axes that hold heads: `axis` itself, and products whose last factor is `axis`, such
            as E = N*H.
    """

    axis: str
    pairs: str
    parts: tuple[int, ...] | None = None
    leaf_axes: str = ""


_FACTOR_OF_WHOLE = Scalar((str, int, float), "a factor such as 1/sqrt(H)", parse_factor)
CARRIES = Key(
    _FACTOR_OF_WHOLE,
    "Factor that the source folds into the weight and that the target's code applies itself: a number, sqrt(D), 1/sqrt(H), or with a fact 1/$name^2; -1 for a weight of the other sign, such as that of a gate z where the target has 1 - z. Default: none.",
)
CARRIES_IN_PARTS = Key(
    Either(
        _FACTOR_OF_WHOLE,
        MapOf(ListOf(INTEGER), "a mapping of a factor to parts, such as {1/sqrt(H): [1]}", parse_factor),
    ),
    f"{CARRIES.doc} Of a sum such as (N H + K H + K H), {{1/sqrt(H): [1]}} names the parts that have the factor.",
)
ROPE = Key(
    MapOf(
        Choice(PAIRS),
        "a mapping of an axis to its pairs, such as {H: interleaved}",
        known=(("parts", ListOf(INTEGER)),),
    ),
    "Mapping of the axis that the source rotates with RoPE, the features of one head, to the features that form a pair: `interleaved` (0, 1) or `half-split` (0, H/2). Where the leaf has all heads in one axis E, `axes` declares E = N*H, and the key names H. Of a sum such as (N H + K H + K H), `parts: [1, 2]` names the parts that RoPE rotates. Default: no RoPE.",
)
TARGET_ROPE = Key(
    Choice(PAIRS),
    "Features that the target's code rotates as a pair, `interleaved` or `half-split`. Default: half-split.",
)


@dataclass(frozen=True)
class Flattened:
    """An axis that the source makes by flattening a map, such as D from H, W and C.

    Attributes:
        axis: letter of the axis.
        order: letters of the map's axes, the slowest first; the last one are the channels.
    """

    axis: str
    order: str


def _parse_order(text: str) -> str:
    if not (text.isascii() and text.isalpha() and len(set(text)) == len(text) > 1):
        raise ValueError(
            f"expected the letters of a map's axes in the order in which they are flattened, such as HWC, not {text!r}"
        )
    return text


_ORDER = Scalar(str, "letters such as HWC", _parse_order)
FLATTENED = Key(
    MapOf(_ORDER, "a mapping of an axis to the axes that it is made of, such as {D: HWC}"),
    "Mapping of an axis that the source gets by flattening a map to the map's axes in the source's order, such as {D: HWC}; `axes` gives their sizes. Default: nothing was flattened.",
)
TARGET_FLATTENED = Key(
    _ORDER, "Order in which the target's code flattens the map. Default: channels first, such as CHW."
)


def read_flattened(value: Mapping[str, str] | None) -> Flattened | None:
    """Read the value of `flattened:`.

    Raises:
        ValueError: not one axis, or one made of itself.
    """
    if value is None:
        return None
    if len(value) != 1:
        raise ValueError(f"`flattened:` names one axis, such as {{D: HWC}}, not {len(value)}")
    (axis, order), *_ = value.items()
    if axis in order:
        raise ValueError(
            f"`flattened:` makes {axis} of {order}, which has {axis} itself; give the axes of the map other letters"
        )
    return Flattened(axis, order)


def read_factor(value: Factor | Mapping[str, Any] | None) -> Factor | None:
    """Read the value of `prescaled_by:`.

    Raises:
        ValueError: not one factor, or no numbers of parts.
    """
    if value is None or isinstance(value, Factor):
        return value
    if len(value) != 1:
        raise ValueError(f"`prescaled_by:` has one factor, such as {{1/sqrt(H): [1]}}, not {len(value)}")
    [(text, parts)] = value.items()
    if not parts or min(parts) < 1 or len(set(parts)) < len(parts):
        raise ValueError(
            f"`prescaled_by:` numbers different parts from 1, such as {{1/sqrt(H): [1]}}, not {list(parts)}"
        )
    return replace(parse_factor(text), parts=tuple(part - 1 for part in parts))


def read_rope(value: Mapping[str, Any] | None) -> Rope | None:
    """Read the value of `rope:`.

    Raises:
        ValueError: not one axis, or no numbers of parts.
    """
    if value is None:
        return None
    axes = {axis: pairs for axis, pairs in value.items() if axis != "parts"}
    if len(axes) != 1:
        raise ValueError(f"`rope:` names one axis, such as {{H: interleaved}}, not {len(axes)}")
    parts = value.get("parts")
    if parts is not None and (not parts or min(parts) < 1 or len(set(parts)) < len(parts)):
        raise ValueError(f"`parts` of `rope:` numbers different parts from 1, such as [1, 2], not {list(parts)}")
    [(axis, pairs)] = axes.items()
    return Rope(axis, pairs, None if parts is None else tuple(part - 1 for part in parts))


EPSILON = 1e-12  # flax's default, in both
V = "spectral_norm_v"  # role of the second vector's leaf
BIAS_U = "spectral_norm_bias"  # role of the leaf that holds the bias's vector u
_FEATURES = Key(
    Scalar(str, "axis letters such as NH", parse_axes),
    "Letters of the weight's axes that this leaf has values for. Default: the output axes (of several, flax uses the last stored one).",
)
NORMALIZED: Mapping[str, Key] = {
    "weight_norm": Key(
        Either(
            PATTERN,
            Record({"scale": Key(PATTERN, "Path of the scale.", required=True), "axes": _FEATURES}, "a weight norm"),
        ),
        "Path of the scale of a flax or Equinox WeightNorm around this layer, or {scale: path, axes: H}. The weight scale * kernel / |kernel| is folded into one tensor, unless the target has a `parametrization`. Default: no weight norm.",
    ),
    "spectral_norm": Key(
        Either(
            PATTERN,
            Record(
                {
                    "u": Key(PATTERN, "Path of the vector u, which has one value per output.", required=True),
                    "v": Key(PATTERN, "Path of the vector v, if the source divides by u w v as stored (Equinox at inference). Default: v is computed by power iteration."),
                    "steps": Key(INTEGER, "Number of power iterations that the source runs from u at every call. Default: 1, as in flax."),
                    "bias": Key(PATTERN, "Path of the vector u of the bias; flax also normalizes a bias with two or more axes. Default: the bias is not normalized."),
                    "axes": _FEATURES,
                },
                "a spectral norm",
            ),
        ),
        "Path of the vector u of a flax SpectralNorm around this layer, or {u: path, steps: 3}; {u: path, v: path} for Equinox. The weight divided by sigma is folded into one tensor; flax computes sigma with one more power iteration at every call, so the stored one is not used. Default: no spectral norm.",
    ),
    "normalization_epsilon": Key(Scalar((float, int), "a number", parse_epsilon), f"Number that weight_norm or spectral_norm adds to a squared norm; 0 for Equinox's weight norm. Default: {EPSILON:g}, as in flax."),
}  # fmt: skip
PARAMETRIZATION = Key(
    Choice(tuple(PARAMETRIZATIONS)),
    "The module has a weight norm, with two tensors: weight_norm (torch.nn.utils.parametrizations: original0, original1) or old_weight_norm (torch.nn.utils.weight_norm: weight_g, weight_v). The scale is the leaf of `weight_norm`, if it has one number for each row of the weight in torch; otherwise it is the length of each row. Default: one weight, with the norm folded into it.",
)


@dataclass(frozen=True)
class Normalized:
    """A weight norm or spectral norm, which the source computes at every call.

    Attributes:
        role: ``weight_norm`` or ``spectral_norm``, and the role of the second leaf.
        epsilon: added to a squared norm.
        paths: role -> path of each leaf other than the weight's.
        axes: letters of the weight's axes that the second leaf has; empty: its outputs.
        steps: of a power iteration; None: one.
    """

    role: str
    epsilon: float
    paths: Mapping[str, Pattern]
    axes: str = ""
    steps: int | None = None


def read_normalized(values: Mapping[str, Any]) -> Normalized | None:
    """Read the keys of a rule; None where it has none of them.

    Raises:
        ValueError: both at once, or an epsilon of neither.
    """
    given = [key for key in ("weight_norm", "spectral_norm") if key in values]
    if len(given) > 1:
        raise ValueError("a weight has `weight_norm` or `spectral_norm`, not both")
    if not given and "normalization_epsilon" in values:
        raise ValueError("`normalization_epsilon` requires `weight_norm` or `spectral_norm`")
    if not given:
        return None
    role, epsilon = given[0], float(values.get("normalization_epsilon", EPSILON))
    more = (
        values[role] if isinstance(values[role], dict) else {"u" if role == "spectral_norm" else "scale": values[role]}
    )
    paths = {role: more["u" if role == "spectral_norm" else "scale"]}
    paths |= {of: more[key] for key, of in (("v", V), ("bias", BIAS_U)) if key in more}
    steps = more.get("steps")
    if "bias" in more and ("v" in more or "bias" not in values):
        missing = "`v`, whose source leaves the bias as it is" if "v" in more else "no `bias:`, the path of the bias"
        raise ValueError(
            f"a spectral norm has `bias:`, the path of the bias's u, and {missing}; leave one of the two out"
        )
    if "v" in more and steps is not None:
        raise ValueError(
            "a spectral norm with `v` takes no steps: it divides by u w v of the two stored vectors; leave `steps` out"
        )
    if steps is not None and steps < 1:
        raise ValueError(
            f"`steps` is at least 1, not {steps}; for a source without power iteration give both `u` and `v`"
        )
    return Normalized(role, epsilon, paths, more.get("axes", ""), 0 if "v" in more else steps)
