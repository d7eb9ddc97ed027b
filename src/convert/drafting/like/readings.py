"""What a drafted rule could mean, and the tensors that it would make then, as the planner says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert.checkpoints.source import Leaf, Source
from convert.core.einsum import parse_projection
from convert.core.errors import ConvertError
from convert.core.path_index import PathIndex
from convert.core.path_pattern import Pattern, parse_pattern
from convert.core.yaml_nodes import load_yaml
from convert.drafting.like.target import Shape
from convert.layers import KINDS
from convert.layers.draft import DraftEntry, DraftLine, flow, plain
from convert.layers.shared_keys import ASK
from convert.planning.planner import make_plan
from convert.rules.attention_macro import WORD as ATTENTION
from convert.rules.parse import parse_rules

KINDS_ASKED = (*(word for word, kind in KINDS.items() if kind.target is not None), ATTENTION)
# Answers with which the planner can compute shapes, which do not depend on them; None: the key is left out.
NEUTRAL: Mapping[str, str | None] = {"multiplies_by": "scale", "epsilon": "1e-6", "num_groups": "1", "padding": None, "flattened": None, "momentum": None, "feature_group_count": None}  # fmt: skip
BY_CONVENTION = ("guess: (in, out)", "guess: (out, in)")  # remarks of equations that only the names of leaves suggest
AS_STORED = frozenset(("from", "axes", "stacked", ""))  # keys of a rule that could be one of a raw parameter
MOST = 24  # readings of one rule


@dataclass(frozen=True)
class Column:
    """The layers of a rule that differ only in their indices.

    Attributes:
        choice: which of the rule's alternatives they are, such as ``query``; empty without alternatives.
        indices: values of the target's indices, of each layer.
        shapes: role -> shape of what each layer makes.
        name: of the first layer in the draft, whose words are those of the tree, or of a library that the draft knows.
        path: of the first layer's leaf.
        last: of the last layer's leaf.
    """

    choice: tuple[int, ...]
    indices: tuple[tuple[int, ...], ...]
    shapes: Mapping[str, Shape]
    name: str
    path: str
    last: str


@dataclass(frozen=True)
class Reading:
    """One meaning of a drafted rule.

    Attributes:
        kind_name: of the target.
        said: key -> answer, of the questions about the layout.
        inside: what the target says besides its module, ``einsum: ...``.
        module: the pattern of the target in the draft.
        columns: what it makes.
    """

    kind_name: str
    said: Mapping[str, str]
    inside: str
    module: Pattern
    columns: tuple[Column, ...]
    fused: bool = False


class _Leaves(Source):
    """Leaves without arrays."""

    def __init__(self, source: Source, leaves: Mapping[str, Leaf]) -> None:
        self.path, self.format, self.leaves, self.given_path = source.path, source.format, leaves, source.given_path

    def read(self, name: str) -> np.ndarray[Any, Any]:
        raise AssertionError("a draft reads no array")


@dataclass(frozen=True)
class Planner:
    """Plans one rule of a draft at a time.

    Attributes:
        source: the checkpoint.
        leaves: those that the draft is for.
        root: of the draft.
        axes: its declarations.
    """

    source: Source
    leaves: Mapping[str, Leaf]
    root: str
    axes: tuple[str, ...]
    _index: list[PathIndex] = field(default_factory=list)

    def readings(self, entry: DraftEntry) -> list[Reading]:
        """Return what the rule could mean, as far as it can be planned; the best guess first."""
        target = target_line(entry)
        if target is None:
            return []
        found: list[Reading] = []
        for kind, module, said, inside in itertools.islice(_alternatives(entry, target), MOST):
            for fused in (False, True):
                reading = self._plan(entry, Reading(kind, said, inside, module, (), fused))
                if reading is not None:
                    found.append(reading)
        return found

    def _plan(self, entry: DraftEntry, reading: Reading) -> Reading | None:
        words = [[f"w{k}" for k in range(len(group.words))] for group in reading.module.groups]
        if reading.fused:
            if not words or reading.kind_name != "linear":
                return None
            words = words[:-1]
        canonical = ".".join(
            ["m", *(f"{{{i}}}" for i in reading.module.indices), *(f"{{{','.join(w)}}}" for w in words)]
        )
        lines = [f"{key}: {value}" for key, value in _said(entry, reading)]
        into = f"{{module: {flow(canonical)}, {reading.inside}}}" if reading.inside else plain(canonical)
        head = [
            "model: m",
            "title: m",
            f"root: {plain(self.root)}" if self.root else "",
            "targets: {torch: {loads: m}}",
        ]
        axes = ["axes:", *(f"  {axis}" for axis in self.axes)] if self.axes else []
        rule = [f"- {reading.kind_name}: {into}", *(f"  {line}" for line in lines)]
        try:
            rules = parse_rules("\n".join([*head, *axes, "rules:", *rule]))
            patterns = [p for rule in rules.rules for p in rule.sources.values()]
            names = dict.fromkeys(name for pattern in patterns for name in self._matches(pattern))
            plan = make_plan(rules, _Leaves(self.source, {name: self.leaves[name] for name in names}))
        except ConvertError:
            return None
        made: dict[tuple[int, ...], dict[tuple[int, ...], dict[str, Shape]]] = {}
        depth = len(reading.module.indices)
        for step in plan.steps:
            keys = step.name.split(".")[1:]
            choice = tuple(int(key[1:]) for key in keys[depth : depth + len(words)])
            role = ".".join(keys[depth + len(words) :])
            at = tuple(map(int, keys[:depth]))
            made.setdefault(choice, {}).setdefault(at, {})[role] = step.spec.shape
        columns = []
        for choice, layers in made.items():
            if len({tuple(sorted(shapes.items())) for shapes in layers.values()}) != 1:
                return None
            every = sorted(layers)
            first, last = (self._path(patterns[0], reading, every[k], choice) for k in (0, -1))
            first_at = dict(zip(reading.module.indices, every[0], strict=True))
            name = reading.module.fill(
                first_at, (*choice, *[0] * len(reading.module.groups))[: len(reading.module.groups)]
            )
            columns.append(Column(choice, tuple(every), layers[every[0]], name, first, last))
        return replace(reading, columns=tuple(columns))

    def _matches(self, pattern: Pattern) -> list[str]:
        if not self._index:
            self._index.append(PathIndex(self.leaves))
        index = self._index[0].from_top if pattern.text.startswith("/") else self._index[0].below(self.root)
        return [name for name, _ in index.matches(pattern)]

    def _path(self, pattern: Pattern, reading: Reading, at: tuple[int, ...], choice: tuple[int, ...]) -> str:
        """Return the path of a layer's leaf from the top of the tree; of several that are fused, the first's."""
        known = dict(zip(reading.module.indices, at, strict=True))
        whole = (*choice, *[0] * len(pattern.groups))[: len(pattern.groups)]
        text = pattern.fill({name: known[name] for name in pattern.indices}, whole)
        return text[1:] if text.startswith("/") else "/".join(filter(None, (self.root, text)))


def target_line(entry: DraftEntry) -> DraftLine | None:
    """Return the line that asks for the target."""
    return next((line for line in entry.lines if line.asks and line.key in KINDS_ASKED and line.value == ASK), None)


def _said(entry: DraftEntry, reading: Reading) -> Iterator[tuple[str, str]]:
    """Yield the keys of the rule without its target, with answers to all questions."""
    given = dict(reading.said)
    for line in entry.lines:
        if (
            not line.key
            or line.key == reading.kind_name
            or (line.asks and line.key in KINDS_ASKED and line.value == ASK)
        ):
            continue
        if line.key in given:
            yield line.key, given.pop(line.key)
        elif not line.asks:
            yield line.key, line.value
        elif line.value != ASK:  # an `ask` within the value
            yield line.key, line.value.replace(f"(residual={ASK})", "").replace(f"scale: {ASK}", "scale: 1")
        elif (value := NEUTRAL.get(line.key)) is not None:
            yield line.key, value
    yield from given.items()


def _alternatives(entry: DraftEntry, target: DraftLine) -> Iterator[tuple[str, Pattern, dict[str, str], str]]:
    """Yield kind, module, answers and what the target says besides, for each combination of what the draft leaves open."""
    ways = [_lines(text) for text, _ in target.below]
    equations = list(_equations(entry))
    for (kind, into), *more in ways:
        if kind == "":
            continue
        try:
            value = load_yaml(f"x: {into}", "draft").value["x"].plain()
        except ConvertError:
            continue
        inside = ""
        if isinstance(value, dict):
            if kind == ATTENTION or "tied" in value or "parametrization" in value:
                continue
            inside = ", ".join(f"{key}: {flow(str(v))}" for key, v in value.items() if key != "module")
            value = value["module"]
        said = dict(more)
        groups = (
            {"num_groups": "1"}
            if kind == "group_norm" and all(line.key != "num_groups" for line in entry.lines)
            else {}
        )
        for equation in equations if "einsum" not in said and kind == "linear" and equations else [""]:
            chosen = {"einsum": equation} if equation else {}
            yield kind, parse_pattern(str(value)), {**said, **groups, **chosen}, inside
            if kind == "linear" and equation and not inside:
                yield kind, parse_pattern(str(value)), {**said, **chosen}, f"einsum: {flow(_in_out(equation))}"
    kinds = {kind for (kind, _), *_ in ways}
    if "parameter" not in kinds and AS_STORED.issuperset(line.key for line in entry.lines if line is not target):
        (_, into), *_ = ways[0]
        text = load_yaml(f"x: {into}", "draft").value["x"].plain()
        module = text["module"] if isinstance(text, dict) else text
        yield "parameter", parse_pattern(str(module)), {}, ""


def _lines(text: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (line.partition(": ") for line in text.split("\n"))]


def _equations(entry: DraftEntry) -> Iterator[str]:
    """Yield the equations that a projection may have: where only names suggest one, the opposite one as well."""
    line = next((line for line in entry.lines if line.key == "einsum"), None)
    if line is None:
        return
    if line.asks:
        yield from (text.removeprefix("einsum: ") for text, _ in line.below)
        return
    yield line.value
    if line.remark.startswith(BY_CONVENTION):
        yield reversed_equation(line.value)


def reversed_equation(equation: str) -> str:
    """Return the equation of the same matrix with its inputs and results exchanged."""
    given = parse_projection(equation)
    return f"...{given.outputs},{given.weight}->...{given.inputs}"


def _in_out(equation: str) -> str:
    """Return the equation of a target that stores the weight with its inputs first."""
    given = parse_projection(equation)
    return f"{equation.split(',')[0]},{given.inputs}{given.outputs}->{equation.split('->')[1]}"


def inputs_first(equation: str) -> bool | None:
    """Whether a matrix is stored (in, out); None if it has other axes."""
    given = parse_projection(equation)
    return given.weight[0] == given.inputs if len(given.weight) == 2 and len(given.inputs) == 1 else None
