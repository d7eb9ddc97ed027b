"""Strides, dilation and padding of a convolution in JAX, and the equivalent arguments of torch.

They are no part of the weights, and JAX and torch define padding differently: ``SAME`` with strides pads more at the end than
at the start, by an amount that depends on the size of the input, and torch's `padding` is symmetric. For a transposed
convolution, ``SAME`` crops torch's result by a different amount at each end.

Sources of the formulas: jax 0.10.2 ``lax/convolution.py`` (``padtype_to_pads``, ``_conv_transpose_padding``); torch 2.13
``torch.nn.ConvTranspose2d``, "Shape". `tests/parity/test_conv_padding.py` runs both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convert.core.fields import INTEGER, Field, Key, ListOf, Scalar, wrong_value
from convert.core.similarity import did_you_mean
from convert.core.yaml_nodes import YamlNode
from convert.layers.shared_keys import parse_fact

NAMED = ("SAME", "SAME_LOWER", "VALID", "CAUSAL")  # jax.lax's, and flax's CAUSAL
Pads = tuple[tuple[int, int], ...]


class PaddingField(Field):
    """A word of `NAMED`, or (low, high) for each spatial axis; one number means both."""

    def read(self, node: YamlNode) -> str | Pads:
        if node.value in NAMED:
            return str(node.value)
        if isinstance(node.value, tuple) and node.value:
            pairs = [self._pair(child) for child in node.value]
            if None not in pairs:
                return tuple(pair for pair in pairs if pair is not None)
        word = str(node.value).upper() if isinstance(node.value, str) else ""
        fix = (
            "leave it out: a rule cannot express wrapped or reflected padding (torch's `padding_mode`)"
            if word in ("CIRCULAR", "REFLECT")
            else did_you_mean(word, sorted(NAMED))
        )
        raise wrong_value(
            node, f"one of {', '.join(NAMED)}, or a pair for each spatial axis such as [[0, 1], [0, 1]]", fix
        )

    def _pair(self, node: YamlNode) -> tuple[int, int] | None:
        if isinstance(node.value, int) and not isinstance(node.value, bool):
            return node.value, node.value
        if isinstance(node.value, tuple) and len(node.value) == 2:
            low, high = (child.value for child in node.value)
            if all(isinstance(n, int) and not isinstance(n, bool) for n in (low, high)):
                return low, high
        return None

    def schema(self) -> dict[str, Any]:
        pair = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
        return {
            "anyOf": [{"enum": list(NAMED)}, {"type": "array", "items": {"anyOf": [{"type": "integer"}, pair]}}],
        }


def _parse_stride(value: int | str) -> int | str:
    return value if isinstance(value, int) else parse_fact(value)


KEYS: Mapping[str, Key] = {
    "padding": Key(
        PaddingField(),
        "Padding of the source: SAME (flax's default), SAME_LOWER, VALID, CAUSAL, or [low, high] for each spatial axis. The plan prints the equivalent torch arguments, and a check compares them. Default: not stated, and not compared.",
    ),
    "strides": Key(
        ListOf(Scalar((int, str), "a number, or $P for the size of an axis", _parse_stride), or_one=True),
        "Strides of the source for each spatial axis: numbers, or $name of a size or a fact, such as $P for patches of P; requires `padding`. Default: 1.",
    ),
    "dilation": Key(
        ListOf(INTEGER, or_one=True),
        "Kernel dilation of the source for each spatial axis; requires `padding`. Default: 1.",
    ),
    "input_size": Key(
        ListOf(INTEGER, or_one=True),
        "Sizes of the source's input along the spatial axes, if they are fixed; the amount of SAME padding depends on them. Default: any size.",
    ),
}

TARGET_PADDING = Key(
    ListOf(INTEGER, or_one=True),
    "Padding of the target's module for each spatial axis, where the code around it pads or cuts, too, so that both compute the same. Default: as the plan derives it from the source's.",
)
STATED = "and the rest by the code around it"


@dataclass(frozen=True)
class Geometry:
    """Arguments of the source's convolution.

    Attributes:
        padding: one of `NAMED`, or numbers for each spatial axis.
        strides, dilation: for each spatial axis.
        input_size: for each spatial axis; empty: any size.
        named: for each spatial axis, the size or fact that the stride is; empty: a number. Empty: all are numbers.
    """

    padding: str | Pads
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    input_size: tuple[int, ...] = ()
    named: tuple[str, ...] = ()

    def resolved(self, values: Mapping[str, Any]) -> Geometry:
        """Return the geometry with the strides that sizes and facts give.

        Raises:
            ValueError: one is unknown, or no number of 1 or more; the message is the reason.
        """
        strides = list(self.strides)
        for k, name in enumerate(self.named):
            number = values.get(name) if name else strides[k]
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(f"`strides` is ${name}, " + ("and nothing gives it a value" if number is None else f"which is {number!r}"))  # fmt: skip
            strides[k] = number
        return replace(self, strides=tuple(strides), named=())

    def widths(self, kernel: Sequence[int]) -> tuple[int, ...]:
        """Return how many positions a dilated kernel of these sizes covers."""
        return tuple(d * (k - 1) + 1 for k, d in zip(kernel, self.dilation, strict=True))


def read_geometry(values: Mapping[str, Any], spatial: int) -> Geometry | None:
    """Read the keys of a rule; None where it has none of them.

    Raises:
        ValueError: not as many numbers as spatial axes, or strides without a padding.
    """
    if "padding" not in values:
        for key in ("strides", "dilation", "input_size"):
            if key in values:
                raise ValueError(f"`{key}:` requires `padding:` (the default is SAME in flax, VALID in Equinox)")
        return None
    found: dict[str, tuple[int, ...]] = {}
    written = values.get("strides", ())
    named = tuple(x if isinstance(x, str) else "" for x in written)
    named = (named * spatial if len(named) == 1 else named) if any(named) else ()
    values = {**values, "strides": tuple(1 if isinstance(x, str) else x for x in written) or (1,) * spatial}
    for key in ("strides", "dilation", "input_size"):
        numbers = values.get(key, () if key == "input_size" else (1,) * spatial)
        numbers = numbers * spatial if len(numbers) == 1 else numbers
        if len(numbers) not in ((0, spatial) if key == "input_size" else (spatial,)):
            raise ValueError(f"`{key}:` has {len(numbers)} numbers, and the convolution {spatial} spatial axes")
        if any(n < 1 for n in numbers):
            raise ValueError(f"`{key}:` is 1 or more, not {min(numbers)}")
        found[key] = numbers
    padding = values["padding"]
    if not isinstance(padding, str) and len(padding) != spatial:
        raise ValueError(f"`padding:` has {len(padding)} pairs, and the convolution {spatial} spatial axes")
    if padding == "CAUSAL" and spatial != 1:
        raise ValueError("`padding: CAUSAL` is flax's for one spatial axis, time")
    return Geometry(padding, found["strides"], found["dilation"], found["input_size"], named)


# ---- an ordinary convolution


def pads(geometry: Geometry, kernel: Sequence[int], size: Sequence[int]) -> Pads:
    """Return how many zeros come before and after each spatial axis of an input of this size."""
    widths = geometry.widths(kernel)
    if not isinstance(geometry.padding, str):
        return geometry.padding
    if geometry.padding == "VALID":
        return ((0, 0),) * len(widths)
    if geometry.padding == "CAUSAL":
        return tuple((k - 1, 0) for k in widths)
    totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, s, k in zip(size, geometry.strides, widths, strict=True)]
    low_first = geometry.padding == "SAME_LOWER"
    return tuple((t - t // 2, t // 2) if low_first else (t // 2, t - t // 2) for t in totals)


@dataclass(frozen=True)
class TorchPadding:
    """The equivalent arguments of torch.

    Attributes:
        text: the arguments as Python code.
        allowed: values of the module's `padding` that compute the same; zeros where code around the module pads, more
            than the source's where that code cuts the result.
        output_padding: that of a transposed convolution.
    """

    text: str
    allowed: tuple[Any, ...]
    output_padding: tuple[int, ...] | None = None


def torch_padding(geometry: Geometry, kernel: Sequence[int], names: str) -> TorchPadding:
    """Return the arguments of torch's convolution that are equivalent to the source's padding.

    Args:
        kernel: its spatial sizes.
        names: a letter for each spatial axis, for messages.
    """
    zeros = [0] * len(kernel)
    cases = [pads_by_rest(geometry, kernel, axis) for axis in range(len(kernel))]
    fixed = [next(iter(set(by_rest.values()))) if len(set(by_rest.values())) == 1 else None for by_rest in cases]
    if all(pair is not None and pair[0] == pair[1] >= 0 for pair in fixed):
        numbers = [pair[0] for pair in fixed if pair is not None]
        words = ["same"] if geometry.padding == "SAME" and set(geometry.strides) == {1} else []
        words += ["valid"] if not any(numbers) else []
        return TorchPadding(f"padding={_tuple(numbers)}", (numbers, *words))
    known = [pair for pair in fixed if pair is not None]
    if len(known) == len(fixed):
        flat = [n for pair in reversed(known) for n in pair]  # F.pad takes the last axis first
        padded = f"F.pad(x, {_tuple(flat)}), then padding=0"
        if geometry.padding == "SAME" and set(geometry.strides) == {1}:
            return TorchPadding(f"padding='same' (it is {padded})", ("same", zeros))
        lows = [low for low, _ in known]
        if all(low >= high >= 0 for low, high in known):  # it starts where the source does, and has more at the end
            padded += f"; or padding={_tuple(lows)}, and the end of the result cut off"
            return TorchPadding(padded, (zeros, lows))
        return TorchPadding(padded, (zeros,))
    shown = "; ".join(pads_shown(names[k], by_rest, geometry.strides[k]) for k, by_rest in enumerate(cases))
    low_high = ", ".join(f"{name} low, {name} high" for name in reversed(names))
    return TorchPadding(f"F.pad(x, ({low_high})), then padding=0, where (low, high) is {shown}", (zeros,))


def stated_padding(numbers: Sequence[int]) -> TorchPadding:
    """Return the padding that a rule states of the target's module."""
    return TorchPadding(f"padding={_tuple(numbers)}, {STATED}", (list(numbers),))


def pads_by_rest(geometry: Geometry, kernel: Sequence[int], axis: int) -> dict[int, tuple[int, int]]:
    """Return the padding of one axis for each remainder of its size divided by the stride; it depends on nothing else."""
    stride = geometry.strides[axis]
    wide = stride * (geometry.widths(kernel)[axis] + 1)
    sizes = [geometry.input_size[axis]] if geometry.input_size else [wide + rest for rest in range(stride)]
    found = {}
    for n in sizes:
        size = [*geometry.widths(kernel)]
        size[axis] = n
        found[n % stride] = pads(geometry, kernel, size)[axis]
    return found


def pads_shown(name: str, by_rest: Mapping[int, tuple[int, int]], stride: int) -> str:
    """Format the padding (low, high) of one axis, for each remainder of its size divided by the stride."""
    if len(set(by_rest.values())) == 1:
        return f"{next(iter(by_rest.values()))} for {name}"
    cases = [f"{pair} for sizes {stride}m{f'+{rest}' if rest else ''}" for rest, pair in by_rest.items()]
    return f"{' and '.join(cases)} of {name}"


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))}{',' * (len(numbers) == 1)})"


# ---- a transposed convolution


def transposed_pads(geometry: Geometry, kernel: Sequence[int]) -> Pads:
    """Return how `jax.lax.conv_transpose` pads its dilated input."""
    if not isinstance(geometry.padding, str):
        return geometry.padding
    found = []
    for k, s in zip(geometry.widths(kernel), geometry.strides, strict=True):
        if geometry.padding == "SAME":
            total = k + s - 2
            low = k - 1 if s > k - 1 else -(-total // 2)
        else:
            total, low = k + s - 2 + max(k - s, 0), k - 1
        found.append((low, total - low))
    return tuple(found)


def crops(geometry: Geometry, kernel: Sequence[int]) -> Pads:
    """Return how much to crop from each end of torch's result (padding=0, output_padding=0); negative: zeros to add."""
    widths = geometry.widths(kernel)
    return tuple((k - 1 - low, k - 1 - high) for k, (low, high) in zip(widths, transposed_pads(geometry, kernel), strict=True))  # fmt: skip


@dataclass(frozen=True)
class TorchTransposed:
    """Arguments of torch's transposed convolution, and what remains to be done with its result.

    Attributes:
        padding, output_padding: for each spatial axis.
        extra: how much to crop from each end of the result; negative: zeros to add (before the bias is added).
    """

    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    extra: Pads


def torch_transposed(geometry: Geometry, kernel: Sequence[int]) -> TorchTransposed:
    """Return torch's arguments as far as they suffice: they crop both ends equally, and extend the end by less than a stride."""
    padding, output, extra = [], [], []
    for (low, high), s, d in zip(crops(geometry, kernel), geometry.strides, geometry.dilation, strict=True):
        fits = low >= 0 and 0 <= low - high < max(s, d)
        # A crop by `padding` beyond what `output_padding` restores would lose values.
        p = low if fits else max(min(low, high), 0)
        more = low - high if fits else 0
        padding.append(p)
        output.append(more)
        extra.append((low - p, high - p + more))
    return TorchTransposed(tuple(padding), tuple(output), tuple(extra))


def torch_transposed_padding(geometry: Geometry, kernel: Sequence[int]) -> TorchPadding:
    """Return the arguments of torch's transposed convolution that are equivalent to the source's padding."""
    made = torch_transposed(geometry, kernel)
    text = f"padding={_tuple(made.padding)}, output_padding={_tuple(made.output_padding)}"
    if any(low or high for low, high in made.extra):
        flat = [-n for pair in reversed(made.extra) for n in pair]
        late = ", without the bias, which is added behind it" if any(n > 0 for n in flat) else ""
        text += f", then F.pad(y, {_tuple(flat)}){late}, which takes off what is negative: torch's arguments alone cannot express this crop"
    return TorchPadding(text, (list(made.padding),), made.output_padding)
