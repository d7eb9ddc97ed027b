"""The rules of buffers that the module computes itself: the timescales of a sinusoidal position embedding, tables of them, masks, indices, and counters of BatchNorms."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.drafting.axis_letters import Letters
from convert.inference.derivation import Derivation, Grade, Tensor
from convert.inference.rule_file.printing.constants import (
    LACKING,
    OWN,
    Neighbour,
    constant,
    equal_ones,
    letters_beside,
    pattern_of,
)
from convert.layers.draft import DraftEntry, plain
from convert.layers.embedding.sinusoids import FACTS, Timescales
from convert.rules.file import further_names

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDING = 1e-6  # of a table in float32
LAYOUTS = ("concatenated", "interleaved")
ENDPOINTS = ("included", "excluded")
UNCOUNTED = "the source counts no batches, and torch needs no count where `momentum` is a number"
NO_WORDS = "the module computes it itself, and they are too many numbers for a rule"


@dataclass(frozen=True)
class _Words:
    """What a rule says of a buffer.

    Attributes:
        width: of the embedding.
        scales: the first and the last timescale.
        keys: further keys of the rule.
    """

    width: int
    scales: tuple[float, float]
    keys: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Buffers:
    """The rules of the buffers that the module computes itself.

    Attributes:
        entries: the rules.
        facts: that they use.
        open: buffers that no rule makes, with the reason.
    """

    entries: tuple[DraftEntry, ...]
    facts: Mapping[str, str]
    open: Mapping[str, str]


def describe_buffers(
    derivation: Derivation,
    letters: Letters,
    lacking: Collection[Tensor],
    neighbours: Sequence[Neighbour],
    shared: Mapping[str, Sequence[str]],
    counters: Collection[str] = (),
) -> Buffers:
    """Describe the tensors that have no source but the module itself; all tables of a file have the same timescales.

    Args:
        lacking: tensors of one number, which the source does without and the rule of their layer does not write.
        neighbours: tensors of layers that have rules.
        shared: module or tensor -> its other names, for which the target's `shared` makes the same tensors.
        counters: of BatchNorms whose tensors have rules of their own: a rule for the layer would write it.
    """
    entries: list[DraftEntry] = []
    unknown: dict[str, str] = {}
    scales: tuple[float, float] | None = None
    numbers = dict(derivation.buffers)
    unsure: dict[str, Array] = {}  # the programs differ in front of them, or at them
    for tensor in derivation.tensors:
        if not tensor.is_own:
            continue
        values = _values(tensor)
        words = next((w for w in _words(values) if scales in (None, w.scales)), None)
        if words is None:
            of = unsure if tensor.grade is Grade.OPEN else numbers
            of |= dict.fromkeys((tensor.name, *tensor.also), values)
            continue
        scales = words.scales
        letter = letters.of_size(words.width)
        entry = DraftEntry()
        entry.say(
            "timescales",
            letter,
            f"{tensor.grade.value}: the module computes it itself, and the source has no such leaf",
        )
        for key, value in words.keys:
            entry.say(key, value)
        entry.say(Timescales.kind_name, plain(tensor.name))
        entries.append(entry)
    ones = {name: np.full(t.shape, t.parts[0].factor) for t in lacking for name in (t.name, *t.also)}
    for of, remark, because in (
        (numbers, "derived: numbers of the module", OWN),
        (unsure, "open: numbers of the module", OWN),
        (ones, "derived", LACKING),
        (dict.fromkeys(counters, np.zeros((), np.int64)), "derived: the counter of a BatchNorm", UNCOUNTED),
    ):
        for names, values in equal_ones(_without_other_names(of, shared)):
            known = letters_beside(names[0], values.shape, neighbours)
            fixed = constant(values, letters, remark, because, known)
            if fixed is None:
                unknown |= dict.fromkeys(names, NO_WORDS)
            else:
                fixed.say("constant", plain(names[0] if len(names) == 1 else pattern_of(names)))
                entries.append(fixed)
    facts = {} if scales is None else {name: f"{scale:g}" for name, scale in zip(FACTS, scales, strict=True)}
    return Buffers(tuple(entries), facts, unknown)


def _without_other_names(of: Mapping[str, Array], shared: Mapping[str, Sequence[str]]) -> dict[str, Array]:
    others = {other for name in of for other in further_names(name, shared)}
    return {name: values for name, values in of.items() if name not in others}


def _values(tensor: Tensor) -> Array:
    (part,) = tensor.parts
    assert part.values is not None
    return part.values[np.argsort(part.elements)].reshape(tensor.shape)


def _words(values: Array) -> Iterator[_Words]:
    """Yield how a rule makes an array."""
    if values.ndim == 1 and len(values) > 1:
        for endpoint in ENDPOINTS:
            if (scales := _scales(values, endpoint)) is not None:
                yield _Words(2 * len(values), scales, (("endpoint", endpoint),) if endpoint != ENDPOINTS[0] else ())
    if values.ndim == 2 and len(values) > 1 and values.shape[1] > 3 and values.shape[1] % 2 == 0:
        half = values.shape[1] // 2
        for layout in LAYOUTS:
            sines, cosines = (
                (values[:, :half], values[:, half:]) if layout == LAYOUTS[0] else (values[:, ::2], values[:, 1::2])
            )
            with np.errstate(all="ignore"):
                factors = np.arctan2(sines[1], cosines[1])
            angles = np.arange(len(values))[:, None] * factors
            if not (
                np.allclose(sines, np.sin(angles), atol=ROUNDING)
                and np.allclose(cosines, np.cos(angles), atol=ROUNDING)
            ):
                continue
            for endpoint in ENDPOINTS:
                if (scales := _scales(factors, endpoint)) is not None:
                    keys = (("positions", str(len(values))), ("layout", layout), ("endpoint", endpoint))
                    yield _Words(values.shape[1], scales, keys)


def _scales(factors: Array, endpoint: str) -> tuple[float, float] | None:
    """Return the first and the last timescale of which a rule makes these factors of a position; round numbers, as people choose them."""
    if (factors <= 0).any():
        return None
    step = math.log(factors[0] / factors[-1]) / (len(factors) - 1)
    last = len(factors) - (endpoint == ENDPOINTS[0])
    if factors[0] <= factors[-1]:  # no timescales, but frequencies such as 1, 2, 4
        return None
    low = float(f"{factors[0]:.6g}")
    high = float(f"{low * math.exp(step * last):.4g}")
    made = low * np.exp(-np.arange(len(factors)) * math.log(high / low) / last)
    return (low, high) if np.allclose(made, factors, rtol=ROUNDING) else None
