"""Kinds that keep their values: embedding tables, raw parameters, dropped leaves, and buffers computed from sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.errors import RuleError
from convert.core.fields import INTEGER, Choice, Either, Key, ListOf, Record, Scalar
from convert.core.path_pattern import Pattern
from convert.core.yaml_nodes import Node
from convert.layers.base import Kind, TargetLayer
from convert.layers.shared_keys import (
    AXES,
    PATTERN,
    REASON,
    TENSOR_TARGET,
    module_target,
    named_axes,
    parse_fact,
    parse_letter,
)
from convert.layers.weight_transforms import CARRIES


def parse_positions(value: str | int) -> str | int:
    """A letter, or a number of positions above 0.

    Raises:
        ValueError: neither.
    """
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"a table has at least one position, not {value}")
        return value
    return parse_letter(value)


@dataclass(frozen=True)
class _Kept(Kind):
    axes: str | None = None

    keys: ClassVar[Mapping[str, Key]] = {"axes": AXES}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> _Kept:
        return cls(values.get("axes"))

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        return named_axes(self.axes, shape)


TIES = ("linear", "embedding", "parameter")  # what a tied table may be under its other names
_MODULES = ListOf(PATTERN, or_one=True)


class _Tied(Either):
    """The names of Linears, or a mapping of a kind of layer to names."""

    def read(self, node: Node) -> Mapping[str, tuple[Pattern, ...]]:
        found = super().read(node)
        named = found if isinstance(found, dict) else {"linear": found}
        if not any(named.values()):
            raise RuleError(f"{node.at}: `tied` names no tensor; leave it out where the table has one name")
        return named


TIED = _Tied(
    _MODULES,
    Record(
        {
            "linear": Key(_MODULES, "modules whose weight is the table, as a Linear without a bias: a tied head"),
            "embedding": Key(_MODULES, "modules whose weight is the table, as an Embedding"),
            "parameter": Key(_MODULES, "full names of tensors that are the table"),
        },
        "`tied`",
    ),
)


@dataclass(frozen=True)
class Embedding(_Kept):
    """A table with a row for each entry, as ``torch.nn.Embedding.weight``.

    Attributes:
        rows: name of the fact that says how many entries there are; None: as many as rows.
        padded: numbers of rows that the source is known to pad its table to; the rows beyond the entries are left out.
    """

    rows: str | None = None
    padded: tuple[int, ...] = ()

    doc: ClassVar[str] = "torch.nn.Embedding: a row for each entry, kept as stored"
    keys: ClassVar[Mapping[str, Key]] = {
        "axes": AXES,
        "rows": Key(
            Scalar(str, "a reference to a fact such as $vocab_size", parse_fact),
            "how many entries there are: a table with other numbers of rows is refused, unless they are `padded`",
        ),
        "padded": Key(
            ListOf(INTEGER, or_one=True),
            "numbers of rows that the source pads its table to; rows beyond the entries are left out, never filled",
        ),
        "prescaled_by": CARRIES,
    }
    target: ClassVar[Record] = module_target(
        tied=Key(
            TIED,
            "where else the state_dict has the same table: a Linear's name (`head.weight = emb.weight`, flax's Embed.attend), or "
            "{linear: ..., embedding: ..., parameter: ...}",
        )
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Embedding:
        if "padded" in values and "rows" not in values:
            raise ValueError("`padded` needs `rows:`, the number of entries")
        return cls(values.get("axes"), values.get("rows"), values.get("padded", ()))

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        if layer.tied and layer.part is not None:
            raise ValueError("a table that is tied is a whole tensor; leave `part` or `tied` out")
        names = [f"{layer.path.text}.{layer.names.get('weight', 'weight')}"]
        for tied in layer.tied:
            indices = ", ".join(f"{{{name}}}" for name in layer.path.indices) or "none"
            groups = [len(group.words) for group in tied.path.groups]
            if (
                tied.path.wild
                or set(tied.path.indices) != set(layer.path.indices)
                or groups != [len(group.words) for group in layer.path.groups]
            ):
                raise ValueError(
                    f"{tied.path} is tied to {layer.path}, so it has the same indices ({indices}), as many alternatives, and no "
                    "wildcard"
                )
            if tied.tensor.text in names:
                raise ValueError(f"{tied.tensor} is named twice; `tied` gives the table's other names")
            names.append(tied.tensor.text)

    def kept_rows(self, rows: int, facts: Mapping[str, Any], set_by_hand: Collection[str]) -> int:
        if self.rows is None:
            return rows
        entries = facts.get(self.rows)
        if entries is None:
            raise ValueError(f"how many entries it has is not known; give it with --set {self.rows}=...")
        if rows == entries or (rows > entries and (rows in self.padded or self.rows in set_by_hand)):
            return int(entries)
        known = " or ".join(map(str, (entries, *(n for n in self.padded if n > entries))))
        if self.rows in set_by_hand:
            raise ValueError(f"it has {rows} rows, fewer than --set {self.rows}={entries}; rows are never made up")
        raise ValueError(
            f"it has {rows} rows, and the vocabulary {known}; give its number of entries with --set {self.rows}={rows}, "
            "and rows beyond that are left out"
        )

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        if len(shape) - (self.axes or "").count(".") != 2:
            raise ValueError("an embedding table has two axes, entries and width")
        return super().letters(role, shape, variant)


@dataclass(frozen=True)
class Parameter(_Kept):
    """A tensor that both sides store alike; what they do with it is the same code."""

    doc: ClassVar[str] = "a raw parameter, kept as stored; the target is the tensor's full name"
    target: ClassVar[Record] = TENSOR_TARGET

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        return path


@dataclass(frozen=True)
class Drop(Kind):
    """Leaves that the target does not want.

    Attributes:
        because: why, in words.
    """

    because: str

    doc: ClassVar[str] = "leaves that are left out, with the reason"
    keys: ClassVar[Mapping[str, Key]] = {"because": Key(REASON, "why these leaves are not wanted", required=True)}
    target: ClassVar[None] = None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Drop:
        return cls(values["because"])


@dataclass(frozen=True)
class Timescales(Kind):
    """Inverse timescales of a sinusoidal position embedding, ``min * (max/min) ** (-k / (D/2 - 1))`` for k < D/2; or the table.

    With `endpoint: excluded` the exponent is ``-k / (D/2)``: the longest timescale is one step short of ``max``.

    Sources: praxis ``layers/embedding_softmax.py`` PositionalEmbedding, transformers 5.23 TimesFmPositionalEmbedding and
    ``models/whisper`` sinusoids (included, concatenated); ``models/marian`` (excluded, concatenated); ``models/speecht5``, as
    the paper has it (excluded, interleaved). They are computed in float64 here and rounded once, to float32.

    Attributes:
        width: letter of the embedding's width D.
        positions: letter or number: the buffer is the table of so many positions, sines and cosines; None: the timescales.
        layout: of the table: all sines and then all cosines, or each sine beside its cosine.
        last: whether ``max`` itself is the last timescale.
    """

    width: str
    positions: str | int | None = None
    layout: str = "concatenated"
    last: str = "included"

    doc: ClassVar[str] = "a buffer that no leaf holds: the inverse timescales of a sinusoidal position embedding"
    keys: ClassVar[Mapping[str, Key]] = {
        "timescales": Key(
            Scalar(str, "an axis letter", parse_letter),
            "letter of the embedding's width; needs the facts min_timescale and max_timescale",
            required=True,
        ),
        "positions": Key(
            Scalar((str, int), "an axis letter or a number", parse_positions),
            "how many rows: the buffer is the table of sines and cosines itself, not the timescales",
        ),
        "layout": Key(
            Choice(("concatenated", "interleaved")),
            "of the table: all sines, then all cosines (concatenated), or each sine beside its cosine (interleaved)",
        ),
        "endpoint": Key(
            Choice(("included", "excluded")),
            "whether max_timescale is the last one: exponents k / (D/2 - 1) (included, the default) or k / (D/2) (excluded)",
        ),
        "when": Key(Scalar(str, "the name of a fact"), "a fact that must be true for the target to have this buffer"),
    }
    target: ClassVar[Record] = TENSOR_TARGET

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Timescales:
        if ("positions" in values) != ("layout" in values):
            raise ValueError("a table has both `positions:` and `layout:`; timescales alone have neither")
        return cls(
            values["timescales"],
            values.get("positions"),
            values.get("layout", "concatenated"),
            values.get("endpoint", "included"),
        )

    def tensor_name(self, path: str, role: str, layer: TargetLayer) -> str:
        return path
