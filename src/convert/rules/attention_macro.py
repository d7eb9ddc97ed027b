"""Expand an `attention` rule to `linear` rules: projections of queries, keys and values, and the output projection.

It describes the multi-head attention of five libraries. ``torch.nn.MultiheadAttention`` holds the first three projections
in one tensor, or in three if keys and values have their own widths, and their biases always in one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from convert.core.errors import RuleError
from convert.core.fields import FLAG, Choice, Either, Key, MapOf, Record, Scalar
from convert.core.findings import Finding
from convert.core.yaml_nodes import YamlNode
from convert.layers.shared_keys import PATTERN, SHARED, parse_axes
from convert.rules.placeholders import ASK

WORD = "attention"


@dataclass(frozen=True)
class Library:
    """How a library stores its attention.

    Attributes:
        kernels: leaves of the projections of queries, keys and values, and of the output projection, below the module.
        biases: leaves of their biases.
        inward, outward: equations of the query, key and value projections, and of the output projection; ``X`` is the width of the input, ``Y`` that of the result.
        heads: letters of the axes of the heads.
        biased: whether it has biases by default.
    """

    kernels: tuple[str, str, str, str]
    biases: tuple[str, str, str, str]
    inward: str
    outward: str
    heads: str
    biased: bool = True


def _named(pattern: str, words: tuple[str, str, str, str]) -> tuple[str, str, str, str]:
    a, b, c, d = (pattern.replace("*", word) for word in words)
    return a, b, c, d


_FLAX = ("query", "key", "value", "out")
_HAIKU = ("query", "key", "value", "linear")
_KERAS = ("query_dense", "key_dense", "value_dense", "output_dense")
_EQUINOX = ("query_proj", "key_proj", "value_proj", "output_proj")
_SPLIT = ("...X,XNH->...NH", "...NH,NHY->...Y", "NH")
# flax 0.12.8 linen/attention.py and nnx/nn/attention.py, keras 3.15 layers/attention/multi_head_attention.py, dm-haiku 0.0.17
# _src/attention.py, equinox 0.13.8 nn/_attention.py. All split the joint width into heads first, then the width of a head.
LIBRARIES: Mapping[str, Library] = {
    "flax.linen.MultiHeadDotProductAttention": Library(_named("*/kernel", _FLAX), _named("*/bias", _FLAX), *_SPLIT),
    "flax.nnx.MultiHeadAttention": Library(_named("*/kernel", _FLAX), _named("*/bias", _FLAX), *_SPLIT),
    "keras.layers.MultiHeadAttention": Library(_named("*/vars/0", _KERAS), _named("*/vars/1", _KERAS), *_SPLIT),
    "haiku.MultiHeadAttention": Library(
        _named("*/w", _HAIKU), _named("*/b", _HAIKU), "...X,XE->...E", "...E,EY->...Y", "E"
    ),
    "equinox.nn.MultiheadAttention": Library(
        _named("*/weight", _EQUINOX), _named("*/bias", _EQUINOX), "...X,EX->...E", "...E,YE->...Y", "E", biased=False
    ),
}
_TARGET = Record(
    {
        "module": Key(PATTERN, "Name of the module in the state_dict.", required=True),
        "projections": Key(
            PATTERN,
            "Names of the three Linears in the module, such as '{q,k,v}_proj'. Default: the module is a torch.nn.MultiheadAttention.",
        ),
        "output": Key(PATTERN, "Name of the output projection. Default: out_proj."),
    },
    "a target",
)
KEYS: Mapping[str, Key] = {
    WORD: Key(
        Either(PATTERN, MapOf(Either(PATTERN, _TARGET))),
        "Target of the whole attention layer: a torch.nn.MultiheadAttention, or separate projections.",
        required=True,
    ),
    "layer": Key(
        Choice(tuple(LIBRARIES)),
        "Class of the source's layer, such as flax.linen.MultiHeadDotProductAttention.",
        required=True,
        example="flax.linen.MultiHeadDotProductAttention",
    ),
    "from": Key(PATTERN, "Path of the layer whose leaves are read.", required=True, example="layers_{i}/attention"),
    "axes": Key(
        Scalar(str, "letters such as DNH", parse_axes),
        "Letters of the width, the heads and the width of a head (DNH); DNHKV if keys and values have their own widths. Libraries that keep all heads in one axis take DE or DEKV.",
        required=True,
        example="DNH",
    ),
    "bias": Key(FLAG, "Whether the layer has biases. Default: as in the library."),
    **{key: SHARED[key] for key in ("stacked", "index_from", "optional", "layer_type", "dtype", "absent_if")},
}
RECORD = Record(dict(KEYS), "an `attention` rule")


@dataclass(frozen=True)
class Expanded:
    """A rule that an `attention` rule expands to.

    Attributes:
        node: the rule, as YAML.
        roles: roles of the leaves that it uses; None: all.
        inner: names that its Linear may have below the torch.nn.MultiheadAttention; empty if the tensors belong to that
            module directly; None if there is no such module.
    """

    node: YamlNode
    roles: tuple[str, ...] | None = None
    inner: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Fixed:
    """A size that torch.nn.MultiheadAttention determines: `letter` is the product of `factors`."""

    letter: str
    factors: str
    at: YamlNode


def expand(node: YamlNode) -> tuple[list[Expanded], Fixed | None]:
    """Return the `linear` rules that an `attention` rule expands to, and the size that its target determines.

    Raises:
        RuleError: the keys contradict each other.
    """
    values = RECORD.read(node)
    library = LIBRARIES[values["layer"]]
    count = len(library.heads)
    letters: str = values["axes"]
    if len(letters) not in (1 + count, 3 + count):
        expected = "D N H, or D N H K V" if count == 2 else "D E, or D E K V"
        problem = f"{values['layer']} has other axes"
        raise RuleError(
            Finding(
                "rule-wrong-value",
                problem,
                rule=str(node.value["axes"].at),
                expected=f"letters in the place of {expected} if keys and values have their own widths",
                got=repr(letters),
            )
        )
    width, heads = letters[0], letters[1 : 1 + count]
    widths = (width, *(letters[1 + count :] or width * 2))
    biased = values.get("bias", library.biased)
    start = values["from"].text
    layers = node.value[WORD]
    asked = layers.value == ASK
    targets = [layers] if not layers.is_mapping or "module" in layers.value else [child for _, child in layers.items()]
    apart = len(letters) > 1 + count

    def equation(text: str, x: str, y: str = "") -> str:
        table = {"X": x, "Y": y, **dict(zip(library.heads, heads, strict=True))}
        return "".join(table.get(letter, letter) for letter in text)

    def rule(linear: Any, eq: str, kernel: str, bias: str | None) -> YamlNode:
        content: dict[str, Any] = {"einsum": eq, "from": f"{start}/{kernel}", "linear": linear}
        content |= {"bias": f"{start}/{bias}"} if bias else {}
        made = {key: _node(value, node) for key, value in content.items()}
        made |= {"linear": layers} if asked else {}
        made |= {key: node.value[key] for key in KEYS if key in SHARED and key != "from" and key in node.value}
        return YamlNode(made, node.at, dict.fromkeys(made, node.at))

    def fused(words: tuple[str, ...]) -> str:
        return f"{{{','.join(words)}}}"

    def linear(build: Any) -> Any:
        if len(targets) == 1 and targets[0] is layers:
            return build(*_module(layers))
        return {name: build(*_module(child)) for name, child in layers.items()}

    rules: list[Expanded] = []
    kernels, biases = library.kernels[:3], library.biases[:3]
    whole = [_module(child)[1] is None for child in targets]
    if any(whole) and not all(whole):
        raise RuleError(
            Finding(
                "rule-layer-conflict",
                "one target is a torch.nn.MultiheadAttention and another has `projections`",
                rule=str(layers.at),
                fix="write a file for each target, or `linear` rules",
            )
        )
    for k in range(3) if apart else ():
        if whole[0]:
            word = ("q", "k", "v")[k]
            to = linear(lambda m, p, o, word=word: {"module": m, "weight": f"{word}_proj_weight"})
            rules.append(Expanded(rule(to, equation(library.inward, widths[k]), kernels[k], None)))
        else:
            to = linear(lambda m, p, o, k=k: f"{m}.{_member(p, k, layers)}")
            rules.append(
                Expanded(rule(to, equation(library.inward, widths[k]), kernels[k], biases[k] if biased else None))
            )
    together = equation(library.inward, width)
    if not apart:
        to = linear(lambda m, p, o: {"module": m, "weight": "in_proj_weight", "bias": "in_proj_bias"} if p is None else f"{m}.{p}")  # fmt: skip
        rules.append(Expanded(rule(to, together, fused(kernels), fused(biases) if biased else None)))
    elif whole[0] and biased:
        to = linear(lambda m, p, o: {"module": m, "bias": "in_proj_bias"})
        rules.append(Expanded(rule(to, together, fused(kernels), fused(biases)), ("bias",)))
    to = linear(lambda m, p, o: f"{m}.{o}")
    rules.append(Expanded(rule(to, equation(library.outward, "", width), library.kernels[3], library.biases[3] if biased else None)))  # fmt: skip
    if not whole[0] or asked:
        return rules, None
    *packed, last = rules
    outer = [replace(one, inner=()) for one in packed]
    names = tuple(dict.fromkeys(_module(child)[2] for child in targets))
    return [*outer, replace(last, inner=names)], Fixed(width, heads, node)


def _module(node: YamlNode) -> tuple[str, str | None, str]:
    if not node.is_mapping:
        return PATTERN.read(node).text, None, "out_proj"
    values = _TARGET.read(node)
    separate = values.get("projections")
    return (
        values["module"].text,
        separate.text if separate else None,
        values["output"].text if "output" in values else "out_proj",
    )


def _member(text: str, k: int, node: YamlNode) -> str:
    """Return the k-th name of ``{q,k,v}_proj``."""
    before, brace, rest = text.partition("{")
    inside, _, after = rest.partition("}")
    words = inside.split(",")
    if not brace or len(words) != 3:
        expected = "names of three Linears in `projections`, such as '{q,k,v}_proj'"
        raise RuleError(Finding("rule-wrong-value", rule=str(node.at), expected=expected, got=repr(text)))
    return f"{before}{words[k]}{after}"


def _node(value: Any, at: YamlNode) -> YamlNode:
    if isinstance(value, Mapping):
        made = {key: _node(child, at) for key, child in value.items()}
        return YamlNode(made, at.at, dict.fromkeys(made, at.at))
    return YamlNode(value, at.at)
