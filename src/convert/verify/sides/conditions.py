"""Find comparisons in the code of the JAX model that the inputs never decide: ``far < WINDOW`` where all positions are near.

Only comparisons with one number that the model's code writes itself are of interest, not those within a library's function. A limit
from above (``relu6``, ``clip``) is one, too. A limit from below is not: it often guards a root or a quotient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.numerics.jax_observer import Step
from convert.numerics.lift_jax import lift
from convert.programs.where import model_line
from convert.references.protocol import JaxSide

Array = np.ndarray[Any, np.dtype[Any]]
# primitive -> in words; and the functions of JAX that code calls for it
WORDS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
FUNCTIONS = {*WORDS, "less", "less_equal", "greater", "greater_equal", "equal", "not_equal"}
FUNCTIONS |= {f"_operator_{name}" for name in WORDS} | {"deferring_binary_op"}  # operators of arrays, by version of JAX
LIMITS = {"relu6", "clip", "clamp", "minimum"}  # functions of JAX and Keras that limit from above
HARD = {
    "hard_sigmoid",
    "hard_swish",
    "hard_silu",
    "hard_tanh",
}  # those that call them; their numbers are not the model's


@dataclass(frozen=True)
class Condition:
    """A comparison with a number.

    Attributes:
        where: ``file.py:line`` of the model's code.
        sign: such as ``<``.
        number: on its right side.
        low, high: of what is on its left side.
        holds: its outcome, where it is the same everywhere.
    """

    where: str
    sign: str
    number: float
    low: float
    high: float
    holds: bool

    @property
    def decided(self) -> bool:
        """Whether the values on the left side give both outcomes."""
        low, high, n = self.low, self.high, self.number
        return {
            "<": low < n <= high,
            ">=": low < n <= high,
            ">": low <= n < high,
            "<=": low <= n < high,
            "==": low <= n <= high and low != high,
            "!=": low <= n <= high and low != high,
        }[self.sign]


def undecided(side: JaxSide, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> tuple[Condition, ...]:
    """Run the JAX model and return the comparisons in its code that have the same outcome everywhere, at every call."""
    seen = _Comparisons()
    lift(side, observer=seen)(dict(weights), dict(inputs))
    found: dict[tuple[str, str, float], list[Condition]] = {}
    for condition in seen.found:
        found.setdefault((condition.where, condition.sign, condition.number), []).append(condition)
    return tuple(calls[0] for calls in found.values() if not any(condition.decided for condition in calls))


@dataclass
class _Comparisons:
    """Observes a lifted run."""

    found: list[Condition] = field(default_factory=list)

    def begin(self, arguments: Sequence[Any]) -> None:
        self.found.clear()

    def choice(self, value: Any) -> None:
        """No comparison of arrays."""

    def step(self, step: Step) -> None:
        if step.primitive.name in ("min", "clamp") and (where := _limited_at()):
            self.limit(step, where)
            return
        if step.primitive.name not in WORDS or step.source or not (where := _where()):
            return
        left, right = (np.asarray(x) for x in step.operands)
        sign = WORDS[step.primitive.name]
        if _is_one(left) and not _is_one(right):
            left, right, sign = right, left, sign.translate(str.maketrans("<>", "><"))
        numbers = all(x.dtype.kind in "iuf" for x in (left, right))
        if not numbers or _is_one(left) or not _is_one(right) or np.isnan(left).any():
            return
        holds = bool(np.asarray(step.results[0]).flat[0])
        self.found.append(Condition(where, sign, float(right.flat[0]), float(left.min()), float(left.max()), holds))

    def limit(self, step: Step, where: str) -> None:
        """Record which values are limited from above, and by which number."""
        values = [np.asarray(x) for x in step.operands[-2:]]  # clamp is given the lower limit in front
        above = [x for x in values if _is_one(x) and x.dtype.kind in "iuf"]
        limited = [x for x in values if not _is_one(x) and x.dtype.kind in "iuf" and not np.isnan(x).any()]
        limited = [x for x in limited if x.dtype.kind == "f"]  # indices are limited to the size of an axis
        if len(above) == len(limited) == 1:
            (x,), number = limited, float(above[0].flat[0])
            self.found.append(Condition(where, "<=", number, float(x.min()), float(x.max()), holds=True))


def _is_one(x: Array) -> bool:
    return bool(x.size) and bool((x == x.flat[0]).all())


def _where() -> str:
    """Return the line of the model's code that compares; empty where the code of a library does."""
    callee = ""
    for file, line, name in _stack():
        if at := model_line([(file, line)]):
            return at if callee in FUNCTIONS or not callee else ""
        callee = name
    return ""


def _limited_at() -> str:
    """Return the line of the model's code that limits by a function of a library; empty where another function does."""
    names: set[str] = set()
    for file, line, name in _stack():
        if at := model_line([(file, line)]):
            return at if names & LIMITS and not names & HARD else ""
        names.add(name)
    return ""


def _stack() -> Iterator[tuple[str, int, str]]:
    frame: Any = sys._getframe(1)
    while frame:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
