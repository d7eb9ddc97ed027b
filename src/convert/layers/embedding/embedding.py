"""Embedding tables: kept as stored, padding rows left out, under all the names that the target ties to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from convert.core.fields import INTEGER, Either, Key, ListOf, Record, Scalar, wrong_value
from convert.core.path_pattern import Pattern
from convert.core.yaml_nodes import YamlNode
from convert.layers.base import PlanView, ProbeSample, Step
from convert.layers.draft import DraftContext, DraftEntry, Layer
from convert.layers.embedding.draft import draft_table
from convert.layers.embedding.mistakes import table_mistakes
from convert.layers.embedding.probe import probe_table
from convert.layers.mistake import Mistake
from convert.layers.parameter.parameter import Stored
from convert.layers.probe import Probe, without_unit_axes
from convert.layers.shared_keys import (
    AXES,
    PATTERN,
    module_target,
    parse_fact,
)
from convert.layers.target import TargetLayer
from convert.layers.weight_keys import CARRIES

TIES = ("linear", "embedding", "parameter")  # what a tied table may be under its other names
_MODULES = ListOf(PATTERN, or_one=True)


class _Tied(Either):
    """The names of Linears, or a mapping of a kind of layer to names."""

    def read(self, node: YamlNode) -> Mapping[str, tuple[Pattern, ...]]:
        found = super().read(node)
        named = found if isinstance(found, dict) else {"linear": found}
        if not any(named.values()):
            raise wrong_value(node, "the name of at least one tensor", "leave `tied` out where the table has one name")
        return named


TIED = _Tied(
    _MODULES,
    Record(
        {
            "linear": Key(
                _MODULES, "Modules whose weight is the table, used as a Linear without a bias (a tied head)."
            ),
            "embedding": Key(_MODULES, "Modules whose weight is the table, used as an Embedding."),
            "parameter": Key(_MODULES, "Full names of tensors that are the table."),
        },
        "`tied`",
    ),
)


@dataclass(frozen=True)
class Embedding(Stored):
    """A table with a row for each entry, as ``torch.nn.Embedding.weight``.

    Attributes:
        rows: name of the fact that says how many entries there are; None: as many as rows.
        padded: numbers of rows that the source is known to pad its table to; the rows beyond the entries are left out.
    """

    rows: str | None = None
    padded: tuple[int, ...] = ()

    rowwise: ClassVar[bool] = True
    kind_name: ClassVar[str] = "embedding"
    doc: ClassVar[str] = "torch.nn.Embedding: one row per entry, copied as stored."
    keys: ClassVar[Mapping[str, Key]] = {
        "axes": AXES,
        "rows": Key(
            Scalar(str, "a reference to a fact such as $vocab_size", parse_fact),
            "Number of entries, or $name of a fact. A table with another number of rows is rejected, unless the number is in `padded`. Default: the number of rows.",
        ),
        "padded": Key(
            ListOf(INTEGER, or_one=True),
            "Numbers of rows that the source pads its table to; the rows beyond the entries are dropped. Default: no padding.",
        ),
        "prescaled_by": CARRIES,
    }
    target: ClassVar[Record] = module_target(
        tied=Key(
            TIED,
            "Other names of the same table in the state_dict: the name of a Linear (`head.weight = emb.weight`, flax's Embed.attend), or {linear: ..., embedding: ..., parameter: ...}. Default: one name.",
        ),
    )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Embedding:
        if "padded" in values and "rows" not in values:
            raise ValueError("`padded` needs `rows:`, the number of entries")
        return cls(values.get("axes"), values.get("rows"), values.get("padded", ()))

    @classmethod
    def draft(
        cls, context: DraftContext, layer: Layer, main: str | None, bias: str | None, either: bool = False
    ) -> DraftEntry:
        assert main is not None
        return draft_table(context, layer, main)

    @property
    def facts_used(self) -> tuple[str, ...]:
        return (self.rows,) if self.rows is not None else ()

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

    def kept_rows(self, rows: int, facts: Mapping[str, Any], set_by_hand: Collection[str]) -> tuple[int, str]:
        if self.rows is None:
            return rows, ""
        entries = facts.get(self.rows)
        if entries is None:
            raise ValueError(f"the number of entries is unknown; set it with --set {self.rows}=...")
        if rows == entries or (rows > entries and (rows in self.padded or self.rows in set_by_hand)):
            why = (
                "the other rows are padding"
                if rows in self.padded
                else f"the other rows are left out, as --set {self.rows}={entries} says"
            )
            return int(entries), why
        known = " or ".join(map(str, (entries, *(n for n in self.padded if n > entries))))
        if self.rows in set_by_hand:
            raise ValueError(f"it has {rows} rows, fewer than --set {self.rows}={entries}; rows cannot be added")
        raise ValueError(f"it has {rows} rows, and the vocabulary {known}; --set {self.rows}={rows} keeps all of them")

    def letters(self, role: str, shape: tuple[int, ...], variant: str | None) -> str | None:
        if len(shape) - (self.axes or "").count(".") != 2:
            raise ValueError("an embedding table has two axes, entries and width")
        return super().letters(role, shape, variant)

    def probe(self, sample: ProbeSample) -> Probe:
        return probe_table(sample, without_unit_axes(sample.stored, self.axes))

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        rule = step.parts[0].rule
        return table_mistakes(step, rule, plan, self.axes or "") if rule is not None else iter(())
