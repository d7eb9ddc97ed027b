"""The values that a fact may have: bounds, words, lengths of lists, as numbers or as formulas of the tree's sizes and other facts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convert.core.fields import FLAG, TEXT, Anything, Choice, Field, Key, ListOf, MapOf, Record, Scalar
from convert.core.yaml_nodes import Position, YamlNode
from convert.layers.shared_keys import parse_letter
from convert.rules.formula import END, Formula, parse_formula

INTEGER, SQUARE, TOKEN, NUMBER, WORD, TRUTH = "integer", "square", "token", "number", "word", "flag"
FEW = 4  # words that are shown as alternatives
KINDS: Mapping[str, str] = {
    INTEGER: "an integer",
    SQUARE: "the square of an integer",
    TOKEN: "the id of a token",
    NUMBER: "a number",
    WORD: "a word",
    TRUTH: "true or false",
}
_BOUNDS: Mapping[str, tuple[str, Callable[[float, float], bool]]] = {
    "above": ("above", lambda value, bound: value > bound),
    "at_least": ("at least", lambda value, bound: value >= bound),
    "below": ("below", lambda value, bound: value < bound),
    "at_most": ("at most", lambda value, bound: value <= bound),
    "equals": ("equal to", lambda value, bound: value == bound),
    "divides": ("that divides", lambda value, bound: value > 0 and bound % value == 0),
    "multiple_of": ("that is a multiple of", lambda value, bound: bound > 0 and value % bound == 0),
}


@dataclass(frozen=True)
class Known:
    """What formulas may refer to.

    Attributes:
        values: sizes of letters, and facts.
        meanings: letter -> its meaning, for people.
        of_layers: letter that varies -> its size in each layer.
        layers_with: path of a leaf, as a rule writes it -> the layers that have it.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)
    of_layers: Mapping[str, Sequence[int]] = field(default_factory=dict)
    layers_with: Mapping[str, Collection[int]] = field(default_factory=dict)

    def value(self, formula: Formula) -> float | None:
        """Compute a formula; None where a name is unknown."""
        numbers = {name: self.values[name] for name in formula.names if is_number(self.values.get(name))}
        if len(numbers) < len(formula.names):
            return None
        try:
            return formula.value(numbers)
        except ArithmeticError:
            return None

    def shown(self, formula: Formula) -> str:
        """Write a formula with its value, and the meaning of a letter: ``E = 8 (experts)``."""
        if not formula.names:
            return formula.text
        value = self.value(formula)
        meaning = f" ({self.meanings[formula.text]})" if formula.text in self.meanings else ""
        return f"{formula.text}{'' if value is None else f' = {value:g}' if value % 1 else f' = {int(value)}'}{meaning}"


NOTHING = Known()


@dataclass(frozen=True)
class Allowed:
    """The values that a fact, or each item of a list, may have.

    Attributes:
        kind: one of `KINDS`; of a list that of its items. Empty: not stated.
        bounds: words of `_BOUNDS` with a formula each.
        one_of: the only values; empty: any.
        others: values that are allowed beside all these, such as null where nothing is capped.
        or_list: whether a list of such values is allowed, too.
        listed: whether the value is a list, whose items have the kind, bounds and words.
        length, total: number of items of a list, and their sum.
        rising: whether each item is above the one before.
        starts_with, ends_with: the first and the last item.
        complete_before_last: fact with a number N: the items before the last N have each value that occurs.
        one_size_of: letter that varies from layer to layer: layers with one item have one size of it.
        leaves: item of a list -> path of a leaf that the layers with this item have, and no others.
        counts_last_of: letter that varies: where it has several sizes, the number of the last layers with the last one.
        at: position of the declaration; None: it follows from how the rules use the fact.
    """

    kind: str = ""
    bounds: tuple[tuple[str, Formula], ...] = ()
    one_of: tuple[Any, ...] = ()
    others: tuple[Any, ...] = ()
    or_list: bool = False
    listed: bool = False
    length: Formula | None = None
    total: Formula | None = None
    rising: bool = False
    starts_with: Any = None
    ends_with: Any = None
    complete_before_last: str = ""
    one_size_of: str = ""
    leaves: Mapping[str, str] = field(default_factory=dict)
    counts_last_of: str = ""
    at: Position | None = field(default=None, compare=False)

    @property
    def varying(self) -> tuple[str, ...]:
        """The letters that vary from layer to layer, whose size in each of them decides."""
        return tuple(letter for letter in (self.one_size_of, self.counts_last_of) if letter)

    @property
    def shown_by_layers(self) -> bool:
        """Whether the tree decides, by the leaves and sizes of its layers."""
        return bool(self.leaves or self.varying or any(map(END.fullmatch, self.names)))

    @property
    def names(self) -> tuple[str, ...]:
        """The facts and letters that it refers to."""
        formulas = [formula for _, formula in self.bounds] + [
            one for one in (self.length, self.total) if one is not None
        ]
        names = [name for formula in formulas for name in formula.names]
        return tuple(dict.fromkeys([*names, *([self.complete_before_last] if self.complete_before_last else [])]))

    def refuses(self, value: Any, known: Known) -> str:
        """Return what the value should have been; empty if it is allowed. What is not `known` limits nothing."""
        if any(_same(value, other) for other in self.others):
            return ""
        if self.listed and (isinstance(value, list) or not self.or_list):
            return "" if isinstance(value, list) and self._takes_list(value, known) else self._described(known)
        items = value if self.or_list and isinstance(value, list) and value else [value]
        return "" if all(self._takes(item, known) for item in items) else self._described(known)

    def _takes(self, value: Any, known: Known) -> bool:
        if self.one_of:
            return any(_same(value, one) for one in self.one_of)
        if self.kind == WORD:
            return isinstance(value, str)
        if self.kind == TRUTH and isinstance(value, bool):
            value = int(value)
        elif (
            self.kind == TRUTH
            or not is_number(value)
            or (self.kind in (INTEGER, SQUARE, TOKEN) and not isinstance(value, int))
        ):
            return False
        if self.kind in (SQUARE, TOKEN) and (value < 0 or (self.kind == SQUARE and math.isqrt(value) ** 2 != value)):
            return False
        limits = ((word, known.value(formula)) for word, formula in self.bounds)
        sizes = known.of_layers.get(self.counts_last_of, ())
        last = _last_of_one_size(sizes)
        return (last is None or (value == last and len({*sizes[:-last]}) == 1)) and all(
            limit is None or _BOUNDS[word][1](value, limit) for word, limit in limits
        )

    def _takes_list(self, value: list[Any], known: Known) -> bool:
        if not all(self._takes(item, known) for item in value):
            return False
        length = known.value(self.length) if self.length is not None else None
        total = known.value(self.total) if self.total is not None else None
        last = known.values.get(self.complete_before_last)
        sizes = known.of_layers.get(self.one_size_of, ())
        before = value[: max(len(value) - last, 0)] if isinstance(last, int) else value
        return (
            (length is None or len(value) == length)
            and (total is None or sum(value) == total)
            and (not self.rising or value == sorted(set(value)))
            and (self.starts_with is None or value[:1] == [self.starts_with])
            and (self.ends_with is None or value[-1:] == [self.ends_with])
            and set(before) == set(value)
            and len({*zip(value, sizes, strict=False)}) <= len({*value})
            and all(
                {k for k, item in enumerate(value) if item == word} == {*layers}
                for word, layers in self._shown_by(known)
            )
        )

    def _shown_by(self, known: Known) -> list[tuple[str, Collection[int]]]:
        """Return the layers that must have an item, as their leaves show it."""
        return [(word, known.layers_with[path]) for word, path in self.leaves.items() if path in known.layers_with]

    def _described(self, known: Known) -> str:
        """Say in words what is allowed."""
        each = " and ".join(f"{_BOUNDS[word][0]} {known.shown(formula)}" for word, formula in self.bounds)
        if self.one_of:
            words = [_text(one) for one in self.one_of]
            each = " or ".join(words) if len(words) < FEW else f"one of {', '.join(words)}"
        kind = "" if self.one_of else KINDS[self.kind or NUMBER]
        alone = " ".join(part for part in (kind, f"of {each}" if each.startswith("at ") else each) if part)
        if not self.listed:
            text = alone
            every = known.of_layers.get(self.counts_last_of, ())
            if (last := _last_of_one_size(every)) is not None:
                text += f", {last}: the last layers with {self.counts_last_of} = {every[-1]}"
                if len(before := dict.fromkeys(every[:-last])) > 1:
                    text += f", behind layers of one size, not of {' and '.join(map(str, before))}"
            others = [_text(other) for other in self.others] + (["a list of such"] if self.or_list else [])
            return " or ".join([text, *others])
        items = {INTEGER: "integers", SQUARE: "squares of integers", WORD: "words", TRUTH: "flags"}.get(
            self.kind, "numbers"
        )
        count = f"{known.shown(self.length)} " if self.length is not None else ""
        text = f"a list of {count}{'values' if self.one_of else items}{f', each {each}' if each else ''}"
        text += f", together {known.shown(self.total)}" if self.total is not None else ""
        text += ", in rising order" if self.rising else ""
        text += f", with {_text(self.starts_with)} at the start" if self.starts_with is not None else ""
        text += f", with {_text(self.ends_with)} at the end" if self.ends_with is not None else ""
        if self.complete_before_last:
            last = known.values.get(self.complete_before_last)
            text += f", where the last {self.complete_before_last}{'' if last is None else f' = {last}'} have no value that those before lack"
        if sizes := known.of_layers.get(self.one_size_of):
            text += f", one for each {self.one_size_of} of the layers ({', '.join(map(str, sizes))})"
        for word, layers in self._shown_by(known):
            which = f"layers {', '.join(map(str, sorted(layers)))}, which have" if layers else "no layer, as none has"
            text += f", {word} in {which} {self.leaves[word]}"
        return " or ".join([*([alone] if self.or_list else []), text, *map(_text, self.others)])


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _last_of_one_size(sizes: Sequence[int]) -> int | None:
    """Return how many of the last layers have the size of the last one; None where all have it."""
    others = [k for k, size in enumerate(sizes) if size != sizes[-1]]
    return len(sizes) - 1 - others[-1] if others else None


def _same(value: Any, other: Any) -> bool:
    """Compare two values; true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# ---- the value of the key


def parse_bound(value: str | int | float) -> Formula:
    """Parse a number, or a formula of facts and letters.

    Raises:
        ValueError: neither.
    """
    text = str(value)
    return Formula(text, parse_formula(text))


_BOUND = Scalar((str, int, float), "a number, or a formula of facts and letters such as E or H//2", parse_bound)
_ONE: dict[str, Key] = {
    "is": Key(
        Choice(tuple(KINDS)), "Kind of the value. Default: that of the values which the file gives it, or a number."
    ),
    "above": Key(_BOUND, "Number that it exceeds. Default: no bound."),
    "at_least": Key(_BOUND, "Smallest number. Default: no bound."),
    "below": Key(_BOUND, "Number that it does not reach, such as V. Default: no bound."),
    "at_most": Key(_BOUND, "Largest number, such as E. Default: no bound."),
    "equals": Key(_BOUND, "Number that it is; of a flag, 1 is true. Default: any."),
    "divides": Key(_BOUND, "Number that is a multiple of it. Default: any."),
    "multiple_of": Key(_BOUND, "Number that it is a multiple of. Default: any."),
    "one_of": Key(ListOf(Anything()), "The only values. Default: any."),
}
_VARYING = Scalar(str, "the letter of an axis that varies", parse_letter)
_EACH = Record(_ONE, "the allowed values of an item")
_WHOLE = Record(
    {
        **_ONE,
        "or": Key(
            ListOf(Anything(), or_one=True),
            "Another value that is allowed, or several: null of a cap means none. Default: none.",
        ),
        "or_list": Key(FLAG, "Whether a list of such values, of `length`, is allowed, too. Default: false."),
        "each": Key(_EACH, "What each item of a list may be. Default: the value is no list."),
        "length": Key(_BOUND, "Number of items of the list. Default: any."),
        "sum": Key(_BOUND, "Sum of the items. Default: any."),
        "rising": Key(FLAG, "Whether each item is above the one before. Default: false."),
        "starts_with": Key(Anything(), "First item of the list. Default: any."),
        "ends_with": Key(Anything(), "Last item of the list. Default: any."),
        "complete_before_last": Key(
            Scalar(str, "the name of a fact"),
            "Fact with a number N: each value of the list occurs before its last N items. Default: any list.",
        ),
        "one_size_of": Key(
            _VARYING,
            "Letter of an axis that varies from layer to layer: layers with the same item have the same size. Default: any list.",
        ),
        "leaves": Key(
            MapOf(TEXT),
            "Mapping of an item of the list to the path of a leaf, as a rule writes it, that the layers with this item have, and no others. Default: any list.",
        ),
        "counts_last_of": Key(
            _VARYING,
            "Letter of an axis that varies from layer to layer: where it has several sizes, the number is that of the last layers with the size of the last one, and those before have one size. Default: any number.",
        ),
    },
    "the allowed values of a fact",
)


class AllowedField(Field):
    """What a fact may be."""

    def read(self, node: YamlNode) -> Allowed:
        values = _WHOLE.read(node)
        each = values.get("each")
        listed = each is not None or bool(values.keys() - _ONE.keys() - {"or", "or_list", "counts_last_of"})
        one = values if each is None else each
        return Allowed(
            kind=one.get("is", ""),
            bounds=tuple((word, one[word]) for word in _BOUNDS if word in one),
            one_of=tuple(one.get("one_of", ())),
            others=tuple(values.get("or", ())),
            or_list=values.get("or_list", False),
            listed=listed,
            length=values.get("length"),
            total=values.get("sum"),
            rising=values.get("rising", False),
            starts_with=values.get("starts_with"),
            ends_with=values.get("ends_with"),
            complete_before_last=values.get("complete_before_last", ""),
            one_size_of=values.get("one_size_of", ""),
            leaves=values.get("leaves", {}),
            counts_last_of=values.get("counts_last_of", ""),
            at=node.at,
        )

    def schema(self) -> dict[str, Any]:
        return _WHOLE.schema()


ALLOWED = AllowedField()
