"""Put wrong tensors with one cause into one finding: a reader looks for causes, not for tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.core.findings import Finding
from convert.layers.base import Step
from convert.verify.mistakes.index_moves import (
    Move,
    find_move,
    find_word_move,
    order_of,
    sources_of,
    without_numbers,
)
from convert.verify.weights.corruption.permutations import THIRDS, describe_order

FIX = "convert again with these rules; change a rule only if the model level shows that the file is right"
SHOWN = 3  # names of further tensors; --json has all
SAME_FUNCTION = "if no other tensor has this axis, the model computes the same function"


@dataclass(frozen=True)
class WrongTensor:
    """A wrong tensor, and what is known of it.

    Attributes:
        step: makes the right one.
        count: number of values that differ.
        name: of the mistake or corruption; empty: none is known.
        problem: a description; the name, for a mistake.
        expected, got: both sides, where the mistake has words for them.
        of: the tensor whose values it holds, if it is that mistake.
        order: of its rows, if they are in another one.
        axis: of the rows.
        thorough: whether all known mistakes were tried.
    """

    step: Step
    count: int
    name: str
    problem: str
    expected: str = ""
    got: str = ""
    of: str = ""
    order: tuple[int, ...] = ()
    axis: int = 0
    thorough: bool = True

    @property
    def rule(self) -> str:
        """``file:line``."""
        return self.step.rule.line_only

    @property
    def move(self) -> Move | None:
        """The number of its name that is wrong, if that is the mistake."""
        return find_move(self.step.name, self.of) if self.of else None


def findings_of(wrong: Sequence[WrongTensor], steps: Sequence[Step]) -> Iterator[Finding]:
    """Yield one finding for each cause, in the order of the tensors.

    Args:
        wrong: the tensors.
        steps: of the plan.
    """
    groups: dict[Hashable, list[WrongTensor]] = defaultdict(list)
    for tensor, key in zip(wrong, _keys(wrong), strict=True):
        groups[key].append(tensor)
    for group in groups.values():
        yield _finding(group, steps)


def _keys(wrong: Sequence[WrongTensor]) -> list[Hashable]:
    """Return a key for each tensor that is equal for those with one cause."""
    moves = _move_keys(wrong)
    rules_of: dict[Hashable, set[str]] = defaultdict(set)
    for tensor in wrong:
        for key in _shared(tensor):
            rules_of[key].add(tensor.rule)
    keys: list[Hashable] = []
    for tensor in wrong:
        move = tensor.move
        if move is not None:
            keys.append(next(key for key in (move.template, move.place) if key in moves))
            continue
        if tensor.of and (words := find_word_move(tensor.step.name, tensor.of)) is not None:
            keys.append((words[0], frozenset(words[1:])))
            continue
        followed = next((key for key, order in moves.items() if tensor.order and _follows(tensor, key, order)), None)
        shared = (key for key in _shared(tensor) if len(rules_of[key]) > 1)
        keys.append(followed or next(shared, (tensor.rule, tensor.name)))
    return keys


def _shared(tensor: WrongTensor) -> Iterator[Hashable]:
    """Yield what is equal in tensors of several rules with one cause."""
    if tensor.order:
        yield _layer(tensor.step.name), tensor.order
    if tensor.name:
        yield tensor.name, tensor.problem, tensor.expected, tensor.got


def _layer(name: str) -> str:
    """Return the name up to its first number: the layer."""
    parts = name.split(".")
    first = next((k for k, part in enumerate(parts) if part.isdecimal()), -1)
    return ".".join(parts[: first + 1])


def _move_keys(wrong: Sequence[WrongTensor]) -> dict[str, tuple[int, ...] | None]:
    """Return the places with moved numbers, each with the order; all layers together where they do not contradict."""
    by_template: dict[str, list[Move]] = defaultdict(list)
    for tensor in wrong:
        if (move := tensor.move) is not None:
            by_template[move.template].append(move)
    keys: dict[str, tuple[int, ...] | None] = {}
    for template, moves in by_template.items():
        sources = sources_of(moves)
        if sources is not None:
            keys[template] = order_of(sources)
            continue
        for place in dict.fromkeys(move.place for move in moves):
            own = sources_of([move for move in moves if move.place == place])
            keys[place] = order_of(own) if own is not None else None
    return keys


def _follows(tensor: WrongTensor, place: str, order: tuple[int, ...] | None) -> bool:
    """Whether the rows of a tensor beside numbered modules, such as those of a router, are in the order of these modules."""
    name = without_numbers(tensor.step.name) if "#" in place else tensor.step.name
    beside = place.rpartition(".")[0]
    padded = None if order is None else (*order, *range(len(order), len(tensor.order)))
    return bool(beside) and name.startswith(f"{beside}.") and tensor.order == padded


def _finding(group: Sequence[WrongTensor], steps: Sequence[Step]) -> Finding:
    lead = _as_heads(next((tensor for tensor in group if tensor.of), group[0]), group)
    rules = dict.fromkeys(tensor.rule for tensor in group)
    values = sum(tensor.count for tensor in group)
    size = sum(tensor.step.spec.size for tensor in group)
    right = f"{lead.step.spec} {sources(lead.step)}" if len(group) == 1 else "what the rules make of the source"
    names = list(dict.fromkeys((lead.step.name, *(tensor.step.name for tensor in group))))
    return Finding(
        "weights-differ",
        _problem(lead, group) + _further(names, [tensor.rule for tensor in group], steps) + _remark(group, steps),
        lead.rule if len(rules) == 1 else "",
        lead.step.name,
        expected=f"{lead.expected} {sources(lead.step)}" if lead.expected else right,
        got=lead.got or f"{values} of {size} values differ",
        fix=FIX,
        data={
            "diagnosis": lead.name,
            "tensors": names,
            "values": values,
            "rules": list(rules),
            "tried": lead.thorough,
        },
    )


def _as_heads(tensor: WrongTensor, group: Sequence[WrongTensor]) -> WrongTensor:
    """Describe an order that several weights share: it is that of heads, and not of the parts of one fused weight."""
    same_order = [other for other in group if other.order == tensor.order and len(other.step.spec.shape) > 1]
    if tensor.name != THIRDS or len(same_order) < 2:
        return tensor
    order = describe_order(np.array(tensor.order), f"rows along axis {tensor.axis}", whole=False)
    return tensor if order is None else replace(tensor, name=order.name, problem=f"{order.text}, as of heads")


def _problem(lead: WrongTensor, group: Sequence[WrongTensor]) -> str:
    if (move := lead.move) is None:
        found = {find_word_move(tensor.step.name, tensor.of) for tensor in group if tensor.of}
        words = sorted(words[1:] for words in found if words is not None)
        if len(words) == 2 and words[0] == words[1][::-1]:
            return f"{lead.name}: {words[0][0]} and {words[0][1]} are exchanged"
        return f"{lead.name}: {words[0][0]} holds what belongs to {words[0][1]}" if len(words) == 1 else lead.problem
    held = sources_of(move for tensor in group if (move := tensor.move) is not None)
    return f"{lead.name}: {_describe_moves(move.word, held)}" if held else lead.problem


def _remark(group: Sequence[WrongTensor], steps: Sequence[Step]) -> str:
    """Say where rows in another order may leave the function as it is: the layers that read them have the same order."""
    orders = [tensor for tensor in group if tensor.order]
    if not orders or len({tensor.order for tensor in orders}) > 1:
        return ""
    if len(orders) == len(group):
        axes = {tensor.axis for tensor in orders if len(tensor.step.spec.shape) > 1}
        return f"; all have the same order: {SAME_FUNCTION}" if len(axes) > 1 else ""
    moved = {tensor.step.name for tensor in group if tensor.of}
    numbered = {f"{move.place}.{move.here}." for tensor in group if (move := tensor.move) is not None}
    if any(step.name not in moved and step.name.startswith(tuple(numbered)) for step in steps):
        return ""
    names = ", ".join([tensor.step.name for tensor in orders][:SHOWN])
    return f"; the rows of {names} have the same order: {SAME_FUNCTION}"


def _describe_moves(word: str, sources: Mapping[int, int]) -> str:
    """Say which number holds what belongs to which."""
    order = order_of(sources)
    if order is not None and (found := describe_order(np.array(order), f"{word}s", whole=False)) is not None:
        return found.text
    shown = [f"{word} {here} holds what belongs to {word} {of}" for here, of in sorted(sources.items())]
    return "; ".join(shown[:3]) + ("; ..." if len(shown) > 3 else "")


def _further(names: Sequence[str], rules: Sequence[str], steps: Sequence[Step]) -> str:
    """Say in which tensors but the first it is so."""
    left = names[1:]
    if not left:
        return ""
    shown = ", ".join(left[:SHOWN]) + (", ..." if len(left) > SHOWN else "")
    if len(set(rules)) > 1:
        return f"; the same in {len(left)} more tensors of {len(set(rules))} rules: {shown}"
    if len(left) == 1:
        return f"; the same in {shown}"
    if len(names) == sum(step.rule.line_only == rules[0] for step in steps):
        return f"; the same in all {len(left)} other tensors of this rule: {shown}"
    return f"; the same in {len(left)} more tensors of this rule: {shown}"


def sources(step: Step) -> str:
    """Name the leaves of a tensor."""
    return f"(from {', '.join(part.leaf for part in step.parts)})"
