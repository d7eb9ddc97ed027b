"""Keys that rules of several kinds have, and how their values are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convert.core.axis_groups import AxisGroup, parse_axis_names, parse_group
from convert.core.fields import FLAG, INTEGER, Choice, Key, ListOf, MapOf, Record, Scalar, located
from convert.core.path_pattern import parse_pattern
from convert.core.tensor_spec import SAFETENSORS_TAGS
from convert.core.yaml_nodes import YamlNode
from convert.layers.leaf_sums import SUM

ASK = "ask"  # the value of a key, or of a fact, that the rule file leaves open

PATTERN = Scalar(str, "a tree path such as layers_{i}/{query,key}/w", parse_pattern)
REASON = Scalar(str, "a reason, in words")


def parse_letter(text: str) -> str:
    """Parse the name of an axis: one letter, as in an einsum.

    Raises:
        ValueError: something else.
    """
    if len(text) != 1 or not (text.isascii() and text.isalpha()):
        raise ValueError(f"the name of an axis is one letter, as in an einsum, not {text!r}")
    return text


def parse_axes(text: str) -> str:
    """Parse the letters of a leaf's axes in stored order, such as ``ED``; spaces are ignored.

    Raises:
        ValueError: no letters, or one twice.
    """
    letters = "".join(text.split())
    if "+" in letters:
        raise ValueError(
            f"{text!r} has a sum; give the axis one letter, and say its parts with `concatenated`, such as {{D: A + B}}"
        )
    for letter in letters:
        parse_letter(letter)
    if not letters or len(set(letters)) < len(letters):
        raise ValueError(f"axes are different letters, such as ED, not {text!r}")
    return letters


def parse_kept_axes(text: str) -> str:
    """Parse letters as `parse_axes` does; a dot is an axis of size 1 that the target does not have.

    Raises:
        ValueError: no letters, or one twice.
    """
    parse_axes(text.replace(".", ""))
    return "".join(text.split())


def named_axes(axes: str | None, shape: tuple[int, ...], text: str = "") -> str | None:
    """Check that the axes of a rule fit the shape of a leaf, and return them.

    Args:
        text: the axes for people; empty: the letters.

    Raises:
        ValueError: another number of axes, or a dot where the size is not 1; the message is the reason.
    """
    if axes is None:
        return None
    text = text or " ".join(axes)
    if len(axes) != len(shape):
        raise ValueError(f"the rule gives it the axes {text}" if text else "the rule says that it is one number")
    wide = [size for letter, size in zip(axes, shape, strict=True) if letter == "." and size != 1]
    if wide:
        raise ValueError(f"the rule's axes {text} have size 1 where there is a dot, and this one has {wide[0]}")
    return axes


def parse_epsilon(value: float | int | str) -> float | str:
    """Parse a small number, or a reference ``$name`` to a fact.

    Raises:
        ValueError: neither.
    """
    if isinstance(value, str):
        return parse_fact(value)
    if not 0 <= value < 1:
        raise ValueError(f"epsilon is added to a variance and is small, such as 1e-6, not {value:g}")
    return float(value)


def parse_fact(text: str) -> str:
    """Parse a reference ``$name`` and return the name.

    Raises:
        ValueError: no dollar sign in front.
    """
    if not text.startswith("$") or not text[1:].replace("_", "a").isalnum():
        raise ValueError(f"expected a number or a reference to a fact such as $epsilon, not {text!r}")
    return text[1:]


def referenced_fact(value: object) -> str | None:
    """Return the name in a reference ``$name``; None for anything else."""
    return value[1:] if isinstance(value, str) and value.startswith("$") else None


def parse_part(text: str) -> tuple[int, int]:
    """Parse ``1 of 2``.

    Raises:
        ValueError: not of this form, or not 1 <= k <= n with n above 1.
    """
    words = text.split()
    if len(words) == 3 and len(text) < 40 and words[1] == "of" and words[0].isdecimal() and words[2].isdecimal():
        k, n = int(words[0]), int(words[2])
        if 1 <= k <= n and n > 1:
            return k, n
    raise ValueError(f"expected a part such as 1 of 2, not {text!r}")


def shown_part(part: Sequence[tuple[int, int]]) -> str:
    """Write a part of a leaf as a rule does: ``1 of 2``, or ``[1 of 2, 2 of 3]``."""
    listed = [f"{k} of {n}" for k, n in part]
    return listed[0] if len(listed) == 1 else f"[{', '.join(listed)}]"


def parse_concatenated(text: str) -> AxisGroup:
    """Parse the parts that stand one after the other along an axis: ``A + B``, ``N H + K`` or ``A + 1``.

    Raises:
        ValueError: fewer than two parts, one twice, or something else; the message is the reason.
    """
    group = parse_group(text)
    if len(group.parts) < 2 or group.before or group.after:
        raise ValueError(f"expected the parts of an axis, one after the other, such as A + B, not {text!r}")
    if len({"".join(sorted(part)) for part in group.parts}) < len(group.parts):
        raise ValueError(
            f"two parts of {text!r} have the same letters; give each its own, which may have the same size"
        )
    return group


_PARTS = MapOf(
    Scalar(str, "parts such as A + B", parse_concatenated),
    "a mapping of an axis to its parts, such as {D: A + B}",
    key=parse_letter,
)
CONCATENATED = Key(
    _PARTS,
    "Mapping of an axis to the parts that the source's code concatenates to it, in its order, such as {D: A + B}. The target has the same key with the parts in its own order. `axes` gives their sizes, but for one. Default: both have the parts in the same order.",
)
TARGET_CONCATENATED = Key(
    _PARTS,
    "Mapping of an axis of the rule's `concatenated` to the same parts in the order in which the target's code concatenates them, such as {D: B + A}. Default: the source's order.",
)


PART = Key(
    Scalar(str, "a part such as 1 of 2", parse_part),
    "Part of the tensor's rows that this rule writes, such as `1 of 2`; other rules write the other parts. Default: the whole tensor.",
)

_PART = Scalar(str, "a part such as 1 of 2", parse_part)
PART_OF_LEAF = Key(
    ListOf(_PART, or_one=True),
    "Part of the leaf that this rule takes, where an axis of the leaf is a sum, such as `1 of 3` of D(F + F + F), or [1 of 2, 2 of 2] where two are; other rules take the other parts. Default: the whole leaf.",
)


def module_target(**extra: Key) -> Record:
    """Return the keys of the long form of a target that is a module."""
    return Record(
        {
            "module": Key(
                PATTERN,
                "Name of the module in the state_dict, with {i} and {a,b} as in `from`. Parts of a leaf that have the same name follow each other in one tensor.",
                required=True,
            ),
            "weight": Key(Scalar(str, "a name"), "Name of the parameter in the module. Default: weight."),
            "bias": Key(Scalar(str, "a name"), "Name of the bias in the module. Default: bias."),
            "part": PART,
            "concatenated": TARGET_CONCATENATED,
            **extra,
        },
        "a target",
    )


TARGET_AXES = Key(
    Scalar(str, "axis letters such as FD.. or .TD", parse_axis_names),
    "Letters of the axes of the target's tensor, in its order: a dot is an axis of size 1, and (N H) is one axis made of two. Of a linear target, (N (1 + 1 + 1) H) are rows with several parts, such as queries, keys and values head by head; of a parameter, ED(F (1 + 1)) is a last axis in which the elements of two leaves alternate, and in E(F + F)D one leaf follows the other; (1 + 1 + 1)VD is a tensor with a leaf for each element of its first axis. Default: as the kind of layer has them.",
)
TENSOR_TARGET = Record({"name": Key(PATTERN, "Full name of the tensor in the state_dict.", required=True)}, "a target")

SHARED: Mapping[str, Key] = {
    "from": Key(
        PATTERN,
        "Path of the source leaf (the kernel, scale or table), with {i} for an index and {a,b} for alternatives.",
    ),
    "stacked": Key(
        MapOf(INTEGER, "a mapping of an index to the axis that stacks it, such as {i: 0}"),
        "Mapping of an index of the target to the axis that the source stacks it on (scanned or vmapped layers). Default: nothing is stacked.",
    ),
    "index_from": Key(
        MapOf(ListOf(Scalar(str, "the name of an index")), "a mapping such as {i: [s, p]}"),
        "Mapping of an index of the target to several indices of the source that together number it, the slowest first: {i: [s, p]}. Default: both sides have the same indices.",
    ),
    "absent_if": Key(PATTERN, "Path of leaves that may exist instead of these: where they exist, these may be absent."),
    "same_size": Key(
        MapOf(Scalar(str, "an axis letter", parse_letter)),
        "Mapping of a letter of the leaves to another letter, which has the same size where the tree has these leaves, such as {K: N}. Default: none.",
    ),
    "optional": Key(FLAG, "Whether the leaves may be absent. Default: false."),
    "optional_last": Key(
        Scalar(str, "the name of a fact"),
        "Fact that counts the last layers whose leaves may be absent; the layers before them have the leaves. Default: no layer may be without them.",
    ),
    "fact_values": Key(
        MapOf(ListOf(Scalar((str, int, float, bool), "a word or a number"))),
        "Mapping of a fact to the values that it may have where the tree has these leaves, such as {feed_forward_proj: [relu]}. Default: any value.",
    ),
    "layer_type": Key(
        Scalar(str, "a word"),
        "Type of the layers that have these leaves, one of those that the header's `layer_types` declares. Default: all layers.",
    ),
    "each": Key(
        ListOf(Scalar(str, "a type of modules"), or_one=True),
        "Types of the target's modules that the rule holds for: `{module}` in its paths is each of them. The header's `modules` lists them. Default: the paths are whole.",
    ),
    "dtype": Key(
        Choice(tuple(SAFETENSORS_TAGS)),
        "Dtype of these tensors in the output, regardless of --dtype. Default: that of --dtype, or of the source.",
    ),
}
BIAS = Key(
    SUM,
    "Path of the leaf of the bias; or a sum that the source computes, of leaves such as x/bias + h/bias or of a leaf and a number such as forget/bias + 1, where the target has one bias. Default: no bias.",
)
FROM_SUM = "; or a sum that the source computes, such as x/bias + h/bias, or scale + 1; or filter/real + 1j * filter/imag, complex numbers of two leaves"
FROM_SEVERAL = "; or a list of paths, whose leaves stand one after the other along an axis of inputs (D + E)"
KEPT_AXES = Scalar(str, "axis letters such as ED, or .ED", parse_kept_axes)
AXES = Key(
    KEPT_AXES,
    "Letters of the leaf's axes in stored order, without stacked axes; a dot is an axis of size 1, which is removed. Default: the leaf is kept as stored.",
)
EPSILON = Key(
    Scalar((float, int, str), "a number or $fact", parse_epsilon),
    "Number that is added to the variance, or $name of a fact.",
)

# jax.nn / flax.linen names on the left; what is stored in the metadata and compared by a check.
ACTIVATIONS: Mapping[str, str] = {
    "relu": "max(x, 0)",
    "silu": "x sigmoid(x), also called swish",
    "gelu_tanh": "GeLU with the tanh approximation: jax.nn.gelu's default, F.gelu(approximate='tanh')",
    "gelu_erf": "exact GeLU: jax.nn.gelu(approximate=False), F.gelu's default",
    "tanh": "tanh(x)",
    "sigmoid": "1/(1+exp(-x))",
    "softplus": "log(1+exp(x))",
    "elu": "x above 0, else exp(x)-1",
    "none": "the identity",
}
# transformers' names (``activations.py`` ACT2FN; T5's ``feed_forward_proj``), and some that occur elsewhere -> ours
ACTIVATION_NAMES: Mapping[str, str] = {
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_erf": "gelu_erf",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gated-gelu": "gelu_tanh",  # not gelu_erf: T5's classes take gelu_new for it
    "gated-gelu_new": "gelu_tanh",
    "gated-gelu_pytorch_tanh": "gelu_tanh",
    "gated-quick_gelu": "quick_gelu",
    "gated-silu": "silu",
    "gated-swish": "silu",
    "gated-relu": "relu",
    "gated-tanh": "tanh",
    "swish": "silu",
    "linear": "none",
    "identity": "none",
}


@dataclass(frozen=True)
class _Activation(Choice):
    """One of `ACTIVATIONS`, or a reference to a fact that is one of them, or of transformers' names."""

    def read(self, node: YamlNode) -> str:
        if isinstance(node.value, str) and node.value.startswith("$"):
            with located(node.at):
                parse_fact(node.value)
            return node.value
        return super().read(node)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [super().schema(), {"type": "string", "pattern": "^[$]"}]}


ACTIVATION = Key(
    _Activation(
        tuple(ACTIVATIONS),
        (
            (
                "gelu",
                "say which one: gelu_tanh (jax.nn.gelu's default) or gelu_erf (torch's default); they differ by up to 4.7e-4",
            ),
            ("swish", "write silu, the same function"),
        ),
    ),
    "Activation that the source applies to the result of this layer; a check compares it. "
    + "; ".join(f"{name}: {formula}" for name, formula in ACTIVATIONS.items())
    + ". Default: not stated, and not compared.",
)
