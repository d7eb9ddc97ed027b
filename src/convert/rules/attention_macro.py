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
# torch.nn.MultiheadAttention's tensors of queries, keys and values in one
_PACKED = {"weight": "in_proj_weight", "bias": "in_proj_bias"}
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
    attention = _read(node)
    inward, outward = _inward(attention), _outward(attention)
    if not attention.in_one_module or attention.asked:
        return [*inward, outward], None
    names = tuple(dict.fromkeys(target.output for target in attention.targets.values()))
    rules = [*(replace(one, inner=()) for one in inward), replace(outward, inner=names)]
    return rules, Fixed(attention.width, attention.heads, node)


@dataclass(frozen=True)
class _Target:
    """The modules of one target.

    Attributes:
        module: name of the module in the state_dict.
        projections: names of its three Linears, such as ``{q,k,v}_proj``; None: it is a torch.nn.MultiheadAttention.
        output: name of its output projection.
    """

    module: str
    projections: str | None = None
    output: str = "out_proj"


@dataclass(frozen=True)
class _Attention:
    """What an `attention` rule says.

    Attributes:
        path: the layer in the checkpoint.
        width: letter of the width of queries and of the result.
        heads: letters of the axes of the heads.
        own: letters of the widths of keys and values, where these have their own.
        targets: the modules of each target, by its name; the name is empty where the rule has one target.
    """

    node: YamlNode
    library: Library
    path: str
    width: str
    heads: str
    own: str
    biased: bool
    targets: Mapping[str, _Target]

    @property
    def asked(self) -> bool:
        return bool(self.node.value[WORD].value == ASK)

    @property
    def in_one_module(self) -> bool:
        """Whether the targets are a torch.nn.MultiheadAttention."""
        return all(target.projections is None for target in self.targets.values())


def _read(node: YamlNode) -> _Attention:
    values = RECORD.read(node)
    library = LIBRARIES[values["layer"]]
    letters: str = values["axes"]
    count = 1 + len(library.heads)
    if len(letters) not in (count, count + 2):
        expected = "D N H, or D N H K V" if len(library.heads) == 2 else "D E, or D E K V"
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
    written = node.value[WORD]
    named = written.is_mapping and "module" not in written.value
    targets = {name: _target(child) for name, child in (written.items() if named else [("", written)])}
    if len({target.projections is None for target in targets.values()}) == 2:
        raise RuleError(
            Finding(
                "rule-layer-conflict",
                "one target is a torch.nn.MultiheadAttention and another has `projections`",
                rule=str(written.at),
                fix="write a file for each target, or `linear` rules",
            )
        )
    biased = values.get("bias", library.biased)
    path = values["from"].text
    return _Attention(node, library, path, letters[0], letters[1:count], letters[count:], biased, targets)


def _target(node: YamlNode) -> _Target:
    if not node.is_mapping:
        return _Target(PATTERN.read(node).text)
    return _Target(**{key: name.text for key, name in _TARGET.read(node).items()})


def _inward(attention: _Attention) -> list[Expanded]:
    """Return the rules of queries, keys and values: one, or one for each where keys and values have their own widths."""
    library, targets, whole = attention.library, attention.targets, attention.in_one_module
    kernels, biases = library.kernels[:3], library.biases[:3]
    biased = attention.biased
    together = _equation(attention, library.inward, attention.width)
    if not attention.own:
        to: dict[str, Any] = {
            name: {"module": target.module, **_PACKED} if whole else f"{target.module}.{target.projections}"
            for name, target in targets.items()
        }
        return [Expanded(_linear(attention, to, together, _braces(kernels), _braces(biases) if biased else None))]
    rules = []
    for k, width in enumerate((attention.width, *attention.own)):
        if whole:
            to = {name: {"module": one.module, "weight": f"{'qkv'[k]}_proj_weight"} for name, one in targets.items()}
        else:
            to = {name: f"{one.module}.{_member(one, k, attention)}" for name, one in targets.items()}
        bias = biases[k] if biased and not whole else None
        rules.append(Expanded(_linear(attention, to, _equation(attention, library.inward, width), kernels[k], bias)))
    if whole and biased:
        to = {name: {"module": target.module, "bias": _PACKED["bias"]} for name, target in targets.items()}
        rules.append(Expanded(_linear(attention, to, together, _braces(kernels), _braces(biases)), ("bias",)))
    return rules


def _outward(attention: _Attention) -> Expanded:
    library = attention.library
    to = {name: f"{target.module}.{target.output}" for name, target in attention.targets.items()}
    equation = _equation(attention, library.outward, "", attention.width)
    bias = library.biases[3] if attention.biased else None
    return Expanded(_linear(attention, to, equation, library.kernels[3], bias))


def _linear(attention: _Attention, to: Mapping[str, Any], equation: str, kernel: str, bias: str | None) -> YamlNode:
    """Return a `linear` rule with the keys that the attention rule shares with it; `to` is the layer of each target."""
    node, path = attention.node, attention.path
    content = {"einsum": equation, "from": f"{path}/{kernel}", "linear": to.get("", to)}
    content |= {"bias": f"{path}/{bias}"} if bias else {}
    made = {key: _node(value, node) for key, value in content.items()}
    made |= {"linear": node.value[WORD]} if attention.asked else {}
    made |= {key: node.value[key] for key in KEYS if key in SHARED and key != "from" and key in node.value}
    return YamlNode(made, node.at, dict.fromkeys(made, node.at))


def _equation(attention: _Attention, text: str, x: str, y: str = "") -> str:
    letters = {"X": x, "Y": y, **dict(zip(attention.library.heads, attention.heads, strict=True))}
    return "".join(letters.get(letter, letter) for letter in text)


def _braces(words: tuple[str, ...]) -> str:
    return f"{{{','.join(words)}}}"


def _member(target: _Target, k: int, attention: _Attention) -> str:
    """Return the k-th name of ``{q,k,v}_proj``."""
    text = target.projections or ""
    before, brace, rest = text.partition("{")
    inside, _, after = rest.partition("}")
    words = inside.split(",")
    if not brace or len(words) != 3:
        expected = "names of three Linears in `projections`, such as '{q,k,v}_proj'"
        at = str(attention.node.value[WORD].at)
        raise RuleError(Finding("rule-wrong-value", rule=at, expected=expected, got=repr(text)))
    return f"{before}{words[k]}{after}"


def _node(value: Any, at: YamlNode) -> YamlNode:
    if isinstance(value, Mapping):
        made = {key: _node(child, at) for key, child in value.items()}
        return YamlNode(made, at.at, dict.fromkeys(made, at.at))
    return YamlNode(value, at.at)
