"""Write the rules of layers whose modules are all known."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convert.drafting.like.assign import Unit, weakest
from convert.drafting.like.habits import Habits, leaf_key, of_known_layout, orientation
from convert.drafting.like.module_patterns import common_pattern, filled, listed_pattern, pattern_of
from convert.drafting.like.readings import BY_CONVENTION, NEUTRAL, Reading, target_line
from convert.drafting.like.target import Place, TargetModel
from convert.layers.draft import DraftEntry, DraftLine, flow, plain

AS_TARGET = "guess: that of the target; the source must have the same"
GEOMETRY = ("padding", "strides", "dilation")
STATED = {"conv": GEOMETRY, "group_norm": ("num_groups",)}  # keys that a kind has and the draft may lack


@dataclass(frozen=True)
class _Piece:
    """Layers of a column that one rule can describe.

    Attributes:
        column: its number.
        indices: of the layers.
        places: their modules.
    """

    column: int
    indices: tuple[tuple[int, ...], ...]
    places: tuple[Place, ...]


class RuleWriter:
    """Writes the rules of an entry whose modules are all known."""

    def __init__(self, entry: DraftEntry, line: DraftLine, unit: Unit, habits: Habits, model: TargetModel) -> None:
        self.entry, self.line, self.unit, self.model = entry, line, unit, model
        self.fitting = of_known_layout(unit)
        self.reading = self.fitting[0]
        self.by_habit = None
        if len({orientation(reading) for reading in self.fitting}) > 1:
            self.by_habit = habits.choose(entry, self.fitting)
            self.reading = self.by_habit or self.reading
        self.kinds = dict.fromkeys(reading.kind_name for reading in self.fitting)

    def entries(self) -> Iterator[DraftEntry]:
        """Yield one rule, or several where the modules have no common pattern or are configured differently."""
        pieces = [piece for k in range(len(self.unit.columns)) for piece in self._pieces(k)]
        whole = all(len(piece.places) == len(self.unit.columns[piece.column].indices) for piece in pieces)
        texts = [self._text(piece) for piece in pieces]
        common = common_pattern([text for text in texts if text is not None]) if None not in texts else None
        same = len({self._configured(piece.places[0]) for piece in pieces}) == 1
        groups = len(self.reading.module.groups) - self.reading.fused
        if whole and common is not None and same and (groups == 1 or len(texts) == 1):
            yield self._written(self.entry.lines, common, weakest(self.unit.matches.values()), pieces[0].places[0])
            return
        for piece, text in zip(pieces, texts, strict=True):
            why = self.unit.matches[piece.column].why
            lines = self._chosen(self.unit.columns[piece.column].choice)
            if text is not None and len(piece.places) == len(self.unit.columns[piece.column].indices):
                yield self._written(lines, text, why, piece.places[0])
            else:
                yield from self._enumerated(piece, lines, why)

    def _pieces(self, k: int) -> Iterator[_Piece]:
        """Yield the layers of a column whose modules are configured equally."""
        column, places = self.unit.columns[k], self.unit.matches[k].series.places
        equal: dict[str, list[int]] = defaultdict(list)
        for n, place in enumerate(places):
            equal[self._configured(place)].append(n)
        for members in equal.values():
            yield _Piece(k, tuple(column.indices[n] for n in members), tuple(places[n] for n in members))

    def _configured(self, place: Place) -> str:
        """Return what a rule says of a module besides its name."""
        return json.dumps([place.module.facts, place.names, self._tied(place)], sort_keys=True)

    def _text(self, piece: _Piece) -> str | None:
        return pattern_of(self.reading.module.indices, piece.indices, piece.places)

    def _enumerated(self, piece: _Piece, lines: Sequence[DraftLine], why: str) -> Iterator[DraftEntry]:
        """Write a rule that lists its layers, as their numbers are not those of the tree, or as others differ."""
        names = self.reading.module.indices
        if any(line.key == "stacked" for line in lines):
            yield self.entry  # an axis has all layers
            return
        listed = listed_pattern(names, piece.indices, piece.places)
        if listed is not None:
            text, known = listed
            yield self._written([_renamed(line, known) for line in lines], text, why, piece.places[0])
            return
        for at, place in zip(piece.indices, piece.places, strict=True):
            alone = dict(zip(names, map(str, at), strict=True))
            yield self._written([_renamed(line, alone) for line in lines], place.name, why, place)

    def _chosen(self, choice: tuple[int, ...]) -> list[DraftLine]:
        """Return the lines for one of the rule's alternatives alone."""
        listed = re.compile(r"\{((?:[^{},\\]|\\.)*(?:,(?:[^{}\\]|\\.)*)+)\}")
        left: dict[str, int] = {}
        main = next(line.value for line in self.entry.lines if line.key in ("from", "bias"))
        for text, number in zip(listed.findall(main.replace("\\\\", "\\")), choice, strict=False):
            left[text] = number

        def one(found: re.Match[str]) -> str:
            number = left.get(found[1].replace("\\\\", "\\"))
            return found[0] if number is None else re.split(r"(?<!\\),", found[1])[number]

        paths = ("from", "bias", "mean", "var", "weight_norm", "spectral_norm", "plus", "times")
        return [
            replace(line, value=listed.sub(one, line.value)) if line.key in paths else line for line in self.entry.lines
        ]

    def _tied(self, place: Place) -> str:
        """Return the other names of a table, as a rule writes them."""
        if self.reading.kind_name != "embedding":
            return ""
        others: dict[str, list[str]] = defaultdict(list)
        for tensor in place.makes:
            for name, kind in self.model.tied.get(tensor, ()):
                word = kind if kind in ("linear", "embedding") else "parameter"
                others[word].append(name if word == "parameter" else name.rpartition(".")[0])
        if list(others) == ["linear"] and len(others["linear"]) == 1:
            return flow(others["linear"][0])
        listed = (f"{word}: [{', '.join(map(flow, names))}]" for word, names in others.items())
        return f"{{{', '.join(listed)}}}" if others else ""

    def _written(self, lines: Sequence[DraftLine], text: str, why: str, place: Place) -> DraftEntry:
        if self.reading.fused:
            why = "; ".join([why or "guess: by its name", "the order of the rows is that of the names in `from`"])
        extra = {role: flow(name) for role, name in place.names.items()}
        if tied := self._tied(place):
            extra["tied"] = tied
        if self.reading.kind_name.endswith("_norm") and place.module.facts.get("multiplies_by") == "1+weight":
            extra["multiplies_by"] = "1+weight"
        made = [new for line in lines for new in self._line(line, text, why, extra, place)]
        return DraftEntry(self.entry.first, made)

    def _line(
        self, line: DraftLine, text: str, why: str, extra: Mapping[str, str], place: Place
    ) -> Iterator[DraftLine]:
        facts = place.module.facts
        known = bool(place.module.kind_name)
        if (
            target_line(self.entry) is not None
            and line.asks
            and line.key == self.line.key
            and line.below == self.line.below
        ):
            keys = {one.key for one in self.entry.lines}
            for key, value in self.reading.said.items():
                if key not in keys and not (key == "num_groups" and key in facts):
                    yield DraftLine(key, value, "")
            for key in STATED.get(self.reading.kind_name, ()):
                if key in facts and key not in keys:
                    yield DraftLine(key, _number(facts[key]), AS_TARGET)
            if len(self.kinds) > 1:
                ways = [(f"{kind}: {target_text(text, self.reading, extra)}", "") for kind in self.kinds]
                yield DraftLine(self.reading.kind_name, line.value, "which of them is it? The target's file does not tell", tuple(ways), asks=True)  # fmt: skip
                return
            yield DraftLine(self.reading.kind_name, target_text(text, self.reading, extra), why)
        elif line.key == "einsum" and "einsum" in self.reading.said:
            yield self._equation(line)
        elif not line.key:
            if not (known and line.below and line.below[0][0].split(": ")[0] in (*GEOMETRY, "momentum", "linear")):
                yield line
        elif line.asks and line.key == "multiplies_by":
            yield self._factor(line, facts)
        elif line.asks and line.key == "feature_group_count" and "feature_group_count" in facts:
            yield DraftLine(line.key, str(facts[line.key]), "guess: that of the target")
        elif line.asks and line.key in facts and line.key in NEUTRAL and line.below:
            yield DraftLine(line.key, _number(facts[line.key]), AS_TARGET)
        else:
            yield line

    def _equation(self, line: DraftLine) -> DraftLine:
        equation = self.reading.said["einsum"]
        ways = dict.fromkeys(reading.said["einsum"] for reading in self.fitting)
        if len(ways) == 1:
            sure = not line.asks and not line.remark.startswith(BY_CONVENTION)
            return line if sure else DraftLine("einsum", equation, "guess: no other equation fits both shapes")
        if self.by_habit is not None:
            return DraftLine("einsum", equation, "guess: as all other matrices of this name, whose shapes show it")
        if not line.asks:
            return line
        return replace(line, below=tuple(one for one in line.below if one[0].removeprefix("einsum: ") in ways))

    def _factor(self, line: DraftLine, facts: Mapping[str, Any]) -> DraftLine:
        factor = facts.get("multiplies_by")
        if factor == "1+weight":
            return DraftLine(line.key, "1+scale", AS_TARGET)
        plain_norm = self.reading.kind_name in ("layer_norm", "group_norm", "batch_norm")
        if factor == "weight" and len(self.kinds) == 1 and (plain_norm or leaf_key(self.entry) == "weight"):
            return DraftLine(line.key, "scale", AS_TARGET)
        return line


def target_text(text: str, reading: Reading, extra: Mapping[str, str] | None = None) -> str:
    inside = [
        *([reading.inside] if reading.inside else []),
        *(f"{key}: {value}" for key, value in (extra or {}).items()),
    ]
    return f"{{module: {flow(text)}, {', '.join(inside)}}}" if inside else plain(text)


def _renamed(line: DraftLine, known: Mapping[str, str]) -> DraftLine:
    """Return a line with values in place of indices; the number of leaves in its remark is then another one."""
    remark = re.sub(r", [0-9]+ leaves", "", line.remark) if known else line.remark
    return replace(line, value=filled(line.value, known), remark=remark)


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
