"""Which leaves a model with these tensors has: each rule backwards, from the names of its tensors to the paths of its leaves."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from convert.core.path_index import TemplateIndex
from convert.core.path_pattern import Index, Match, Pattern, parse_pattern
from convert.layers import Numbering, Rule, TargetLayer

Values = tuple[tuple[str, int], ...]  # index -> value


@dataclass
class WantedLeaf:
    """A leaf that the rules need for tensors that there are.

    Attributes:
        rule: as the layout writes it.
        role: of the leaf.
        path: as the pattern of the rule gives it.
        stack: index of a stacked axis -> number of its elements.
        split: axis of whose elements each is a tensor of its own -> number of its elements.
        tensors: names of those that it is made of, as far as there are any.
    """

    rule: Rule
    role: str
    path: str
    stack: dict[str, int] = field(default_factory=dict)
    split: dict[str, int] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)


class TensorNames:
    """The names of the tensors."""

    def __init__(self, names: Sequence[str]) -> None:
        self._index = TemplateIndex((name, (name,)) for name in names)

    def matches(self, pattern: Pattern) -> list[tuple[str, Match]]:
        """Return the tensors with such names, each with what the pattern binds in its name."""
        return self._index.matches(pattern)

    def find(self, rule: Rule, role: str, layer: TargetLayer) -> list[tuple[str, Match]]:
        """Return the tensors that this role of a rule has in a layer."""
        return self.matches(pattern_of(rule, role, layer))


def pattern_of(rule: Rule, role: str, layer: TargetLayer) -> Pattern:
    """Return the pattern of the tensors' names."""
    return parse_pattern(rule.kind.tensor_name(layer.path.text, role, layer))


def claimed(rules: Sequence[Rule], target: str, names: TensorNames) -> dict[int, set[str]]:
    """Return number of the rule -> the tensors that have its names."""
    found: dict[int, set[str]] = {}
    for k, rule in enumerate(rules):
        if not rule.sources or rule.kind.drop_reason is not None:
            continue
        layers = [layer for one in rule.each_layer(target) if (layer := one.layer(target)) is not None]
        patterns = [pattern_of(rule, role, layer) for layer in layers for role in rule.sources]
        patterns += [tied.tensor for layer in layers for tied in layer.tied]
        found[k] = {name for pattern in patterns for name, _ in names.matches(pattern)}
    return found


def wanted_leaves(
    rules: Sequence[Rule], target: str, names: TensorNames, layers: Mapping[str, int] = MappingProxyType({})
) -> list[WantedLeaf]:
    """Return the leaves of all rules.

    Args:
        layers: index -> number of its values, where the rules state it: other values are those of another rule's layers.

    A rule that has some tensors of its layers needs all, and a rule that must have leaves needs them: what is then missing is
    found when the plan is compared with the tensors.

    Raises:
        ValueError: the tensors' names do not give the paths; the message is the reason.
    """
    counts = {index: min(count, layers.get(index, count)) for index, count in _counts(rules, target, names).items()}
    after = _offsets(rules, counts)
    other_types = _of_other_types(rules, target, names)
    found: dict[tuple[int, str, str], WantedLeaf] = {}
    for k, rule in enumerate(rules):
        layer = rule.layer(target)
        if layer is None or not rule.sources or rule.kind.drop_reason is not None:
            continue
        may_lack = rule.optional or rule.absent_if is not None or rule.layer_type is not None
        present = {
            role: [
                (name, match)
                for name, match in names.find(rule, role, layer)
                if all(n < counts[i] for i, n in match.indices) and match.indices not in other_types.get(k, ())
            ]
            for role in rule.sources
        }
        if not any(present.values()) and may_lack:
            continue
        every = [values for of_role in present.values() for _, (values, _) in of_role]
        if not may_lack:
            every += _all_values(pattern_of(rule, rule.lead, layer), counts)
        for role, pattern in rule.sources.items():
            if rule.kind.packed and role in rule.kind.may_lack:
                continue  # the tensor is there without it, too
            optional = role in rule.kind.may_lack or (role != rule.lead and rule.optional)
            given = [(name, values, choices) for name, (values, choices) in present[role]]
            if not optional:
                known = {(values, choices) for _, values, choices in given}
                target_choices = list(pattern_of(rule, role, layer).all_choices())
                given += [
                    ("", values, choices)
                    for values in dict.fromkeys(every)
                    for choices in target_choices
                    if (values, choices) not in known
                ]
            for name, values, choices in given:
                indices = _source_indices(rule, dict(values), after.get(k, {}))
                if indices is None:
                    continue
                stack = {index: indices[index] for index in rule.stacked}
                for own in _source_choices(pattern, choices):
                    path = pattern.fill(indices, own)
                    leaf = found.setdefault((k, role, path), WantedLeaf(rule, role, path))
                    leaf.tensors += [name] if name else []
                    leaf.split = {axis: counts[axis] for axis in rule.split_axes(layer) if axis in counts}
                    for index, value in stack.items():
                        leaf.stack[index] = max(leaf.stack.get(index, 0), value + 1)
    return list(found.values())


def _of_other_types(rules: Sequence[Rule], target: str, names: TensorNames) -> dict[int, set[Values]]:
    """Return number of a rule for layers of one type -> the layers whose tensors are those of another type.

    Layers of two types may share names: keys and values, or keys that are the values. The rule that finds all of its tensors holds,
    and of two such rules the one that finds more.
    """
    tensors: dict[Values, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    whole: dict[int, int] = {}  # number of tensors in a layer that has all
    for k, rule in enumerate(rules):
        layer = rule.layer(target)
        if rule.layer_type is None or layer is None:
            continue
        whole[k] = len(list(pattern_of(rule, rule.lead, layer).all_choices()))
        for name, match in names.find(rule, rule.lead, layer):
            tensors[match.indices][k].add(name)
    found: dict[int, set[Values]] = defaultdict(set)
    for values, of_rules in tensors.items():
        rank = {k: (len(own) == whole[k], len(own)) for k, own in of_rules.items()}
        for k, other in itertools.permutations(of_rules, 2):
            if (
                of_rules[k] & of_rules[other]
                and rules[k].layer_type != rules[other].layer_type
                and rank[k] < rank[other]
            ):
                found[k].add(values)
    return found


def _counts(rules: Sequence[Rule], target: str, names: TensorNames) -> dict[str, int]:
    """Return how many values each index of the target has."""
    counts: dict[str, int] = {}
    for rule in rules:
        layer = rule.layer(target)
        if layer is None or rule.kind.drop_reason is not None:
            continue
        for role in rule.sources:
            for _, match in names.find(rule, role, layer):
                for index, value in match.indices:
                    counts[index] = max(counts.get(index, 0), value + 1)
    return counts


def _all_values(pattern: Pattern, counts: Mapping[str, int]) -> Iterator[Values]:
    if all(index in counts for index in pattern.indices):
        for values in itertools.product(*(range(counts[index]) for index in pattern.indices)):
            yield tuple(zip(pattern.indices, values, strict=True))


@dataclass(frozen=True)
class _Run:
    """The layers that a path of several has: those from `offset` on, in `limit` units; None: all that there are."""

    offset: int
    limit: int | None


def _offsets(rules: Sequence[Rule], counts: Mapping[str, int]) -> dict[int, dict[str, _Run]]:
    """Return number of the rule -> index -> its run, for rules that stand for several paths, one after the other."""
    places: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for k, rule in enumerate(rules):
        if rule.index_from:
            places[rule.at.file, rule.at.line, rule.at.column].append(k)
    found: dict[int, dict[str, _Run]] = {}
    for several in places.values():
        done: dict[str, int] = {}
        units: dict[tuple[str, tuple[str, ...]], _Run] = {}  # paths with other positions of the same units
        for k in several:
            runs = found.setdefault(k, {})
            for index, numbering in rules[k].index_from.items():
                if numbering.positions and (index, numbering.order) in units:
                    runs[index] = units[index, numbering.order]
                    continue
                start, unit = done.get(index, 0), math.prod(_inner(rules[k], numbering))
                limit = None if k == several[-1] else (counts.get(index, 0) - start) // unit
                runs[index] = units[index, numbering.order] = _Run(start, limit)
                done[index] = start + (limit or 0) * unit
    return found


def _inner(rule: Rule, numbering: Numbering) -> list[int]:
    """Return the number of values of each index of a numbering but the first.

    Raises:
        ValueError: only a tree has it.
    """
    words = {
        piece.name: len(piece.words)
        for pattern in rule.sources.values()
        for piece in pattern.pieces
        if isinstance(piece, Index) and piece.words
    }
    inner = []
    for name in numbering.order[1:]:
        size = words.get(name) or (numbering.period if name == numbering.order[-1] else None)
        if size is None:
            raise ValueError(f"nothing but a tree tells how many values {{{name}}} has")
        inner.append(size)
    return inner


def _source_indices(rule: Rule, values: dict[str, int], runs: Mapping[str, _Run]) -> dict[str, int] | None:
    """Return the indices of the source for those of the target; None: they are those of another path.

    Raises:
        ValueError: the names of the tensors do not have them.
    """
    indices = dict(values)
    for name, numbering in rule.index_from.items():
        run = runs[name]
        if name not in values:
            raise ValueError(f"no name of a tensor has {{{name}}}")
        number = values[name] - run.offset
        if not numbering.holds(number):
            return None
        for inner, count in reversed(list(zip(numbering.order[1:], _inner(rule, numbering), strict=True))):
            number, place = divmod(number, count)
            own = numbering.positions if inner == numbering.order[-1] else ()
            indices[inner] = own.index(place) if own else place
        indices[numbering.order[0]] = number
        if number < 0 or (run.limit is not None and number >= run.limit):
            return None
    needed = {*rule.path.indices, *rule.stacked}
    if missing := needed - indices.keys():
        raise ValueError(f"no name of a tensor has {{{min(missing)}}}")
    return indices


def _source_choices(pattern: Pattern, choices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the alternatives of the source for those of a tensor: it has more where several leaves are rows of one tensor."""
    yield from (
        (*choices[: len(pattern.groups)], *more)
        for more in itertools.product(*(range(len(words.words)) for words in pattern.groups[len(choices) :]))
    )
