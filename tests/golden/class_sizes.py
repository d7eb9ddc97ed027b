"""Which keys of `config.json` the axes of a class's tensors follow: the class is built on the meta device with other values.

The formulas are those of `convert.planning.modules.table`: sums of products of numbers, keys and whole quotients of keys.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

LABELS = "num_labels"
NO_SIZES = (
    "layers",
    "_id",
    "_ids",
    "num_labels",
    "depths",
    "_position",
    "tdnn_dilation",
    "tdnn_dim",
    "tdnn_kernel",
)  # ends of keys
FACTORS = (2, 3, 4)
Shapes = Mapping[str, tuple[int, ...]]
Axis = tuple[str, int]  # tensor, axis
Samples = list[tuple[dict[str, int], int]]  # values of keys, size
Changes = tuple[tuple[str, int], ...]


class Sizes:
    """The sizes of one configuration.

    Args:
        raw: all keys of a config.json.
        shapes: returns the shapes of the class with a config.json.
    """

    def __init__(self, raw: Mapping[str, Any], shapes: Callable[[Mapping[str, Any]], Shapes]) -> None:
        self._raw, self._shapes = raw, shapes
        self._seen: dict[Changes, Shapes | None] = {}
        self.keys = {
            key: value
            for key, value in _numbers(raw)
            if value > 0 and not any(part.endswith(NO_SIZES) for part in key.split("."))
        }
        self.keys[LABELS] = 2

    @cached_property
    def _others(self) -> dict[str, tuple[int, ...]]:
        """Key -> two other values with which the class can be built."""
        multiples = {key: tuple(k * value for k in FACTORS) for key, value in self.keys.items()}
        return {
            key: tuple(itertools.islice((one for one in values if self.at(((key, one),))), 2))
            for key, values in multiples.items()
        }

    def at(self, changes: Changes) -> Shapes | None:
        """Return the shapes with other values of keys; None where the class cannot be built with them."""
        if changes not in self._seen:
            raw = changed(self._raw, dict(changes))
            try:
                self._seen[changes] = self._shapes(raw)
            except Exception:  # noqa: BLE001  # whatever a class raises on sizes that do not fit
                self._seen[changes] = None
        return self._seen[changes]

    def depends(self, axis: Axis) -> tuple[str, ...]:
        """Return the keys that an axis follows."""
        base = self._size(axis, ())
        return tuple(
            key
            for key, others in self._others.items()
            if any(self._size(axis, ((key, other),)) not in (None, base) for other in others)
        )

    def formula(self, axis: Axis) -> str:
        """Return the formula of an axis; of one that no key changes, its number; empty where none is found, or no such tensor."""
        keys = self.depends(axis)
        base = self._size(axis, ())
        if base is None:
            return ""
        if not keys:
            return str(base)
        samples: Samples = []
        for values in itertools.product(*[(self.keys[key], *self._others[key]) for key in keys]):
            changes = tuple((key, value) for key, value in zip(keys, values, strict=True) if value != self.keys[key])
            if (size := self._size(axis, changes)) is not None:
                samples.append((dict(zip(keys, values, strict=True)), size))
        return next((text for term in _terms(keys) if (text := _fitted(term, samples))), "") or _of_multiples(
            keys, samples
        )

    def _size(self, axis: Axis, changes: Changes) -> int | None:
        found = (self.at(changes) or {}).get(axis[0], ())
        return found[axis[1]] if axis[1] < len(found) else None


def changed(raw: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values; None removes a key."""
    made = copy.deepcopy(dict(raw))
    for key, value in values.items():
        *parts, last = key.split(".")
        of: Any = made
        for part in parts:
            of = of[part]
        if key == LABELS:
            made.pop("id2label", None)
            made.pop("label2id", None)
        if isinstance(of, list):
            of[int(last)] = value
        elif value is None:
            of.pop(last, None)
        else:
            of[last] = value
    return made


def _numbers(raw: Any, before: str = "") -> Iterator[tuple[str, int]]:
    items = raw.items() if isinstance(raw, dict) else enumerate(raw)
    for key, value in items:
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{before}{key}", value
        elif str(key).endswith("_config") or (isinstance(value, list) and all(type(one) is int for one in value)):
            yield from _numbers(value or {}, f"{before}{key}.")


Term = list[tuple[int, tuple[str, ...]]]  # a sum of products


def _terms(keys: tuple[str, ...]) -> Iterator[Term]:
    if len(keys) == 1:
        yield from ([(1, keys)], [(1, (f"{keys[0]}//2",))], [(1, (f"{keys[0]}//4",))], [(1, keys * 2)])
    if len(keys) == 2:
        yield [(1, keys)]
        yield [(1, keys[:1]), (1, keys[1:])]
    for one, other, *more in itertools.permutations(keys) if len(keys) > 1 else ():
        quotient = f"{one}//{other}"
        yield [(1, (quotient, *more))]
        yield [(1, (quotient, quotient))]
        yield [(1, (quotient, quotient)), (-1, (quotient,))]


def _of_multiples(keys: tuple[str, ...], samples: Samples) -> str:
    """Return the formula of one key, where another one, such as a number of heads, must divide it and has no effect then."""
    for one, other in itertools.permutations(keys, 2) if len(keys) == 2 else ():
        divided = [(values, size) for values, size in samples if values[one] % values[other] == 0]
        for term in _terms((one,)):
            if text := _fitted(term, divided):
                return text
    return ""


def _fitted(term: Term, samples: Samples) -> str:
    """Return `a*term+b` where it holds for all samples."""
    found = [(sum(by * _product(factors, values) for by, factors in term), size) for values, size in samples]
    (x, y), *rest = found
    other = next(((u, v) for u, v in rest if u != x), None)
    if other is None or (other[1] - y) % (other[0] - x):
        return ""
    a = (other[1] - y) // (other[0] - x)
    b = y - a * x
    if any(a * u + b != v for u, v in found):
        return ""
    products = ["*".join([*([str(a * by)] if a * by != 1 else []), *factors]) for by, factors in term]
    return "+".join([*products, *([str(b)] if b else [])])


def _product(factors: tuple[str, ...], values: Mapping[str, int]) -> int:
    product = 1
    for factor in factors:
        key, _, by = factor.partition("//")
        product *= values[key] // (values[by] if by in values else int(by)) if by else values[key]
    return product
