"""The interface by which a lifted JAX function reports its run: each primitive, and the values that decide its branches and loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, eq=False)
class Step:
    """A primitive that was evaluated.

    Attributes:
        primitive: JAX's primitive.
        operands: its arguments.
        params: its parameters, as the code gave them.
        results: what it returned.
        lifted: whether it was evaluated in float64 throughout.
        source: what the jaxprs around it say of its place in the code, the outermost first; empty when running code bound it.
        evaluate: evaluates a primitive with parameters on arguments; returns the results, and whether in float64 throughout.
        place: what the observer returned for the primitive of which a loop repeats this one; None of another.
    """

    primitive: Any
    operands: Sequence[Any]
    params: Mapping[str, Any]
    results: Sequence[Any]
    lifted: bool
    source: tuple[Any, ...]
    evaluate: Callable[[Any, Mapping[str, Any], Sequence[Any]], tuple[list[Any], bool]]
    place: Any = None


class Observer(Protocol):
    """Receives what a lifted function evaluates."""

    def begin(self, arguments: Sequence[Any]) -> None:
        """The evaluation begins, with these arrays; what it received before was given up."""

    def step(self, step: Step) -> Any:
        """A primitive was evaluated, which is neither a call, a loop nor a branch; return what a repetition needs of its place."""

    def choice(self, value: Any) -> None:
        """This value chose a branch, or whether a loop goes on; in the eager mode, it became a Python truth value or index."""
