"""Pairs of small models that differ by one planted fault in the PyTorch side, for the tests of `infer`.

In the code of a module, `self.has(name)` guards a fault. The difference must be found on this line, on the next one, or on one
marked ``# shows: name``, such as the line that uses a value as it is where an operation is missing. All widths of a model are equal: no shape tells.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

D, N = 8, 2
H = D // N
SQUARE = (D, D)


@dataclass(frozen=True)
class Pair:
    """A function of JAX, a module of PyTorch that takes the name of a fault, and the faults.

    Attributes:
        function: of (leaves by name, x).
        shapes: of the leaves.
        module: made with the name of a fault, or with an empty one.
        inputs: of a seed.
        faults: their names; `support.planted.words` has what must be said of them.
    """

    function: Callable[[Mapping[str, Any], Any], Any]
    shapes: Mapping[str, tuple[int, ...]]
    module: Callable[[str], torch.nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    faults: tuple[str, ...]


class Faulty(torch.nn.Module):
    """A module with at most one fault."""

    def __init__(self, fault: str = "", layers: int = 0, *, bias: bool = True, norms: int = 0) -> None:
        super().__init__()
        self.fault = fault
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=bias) for _ in range(layers))
        self.n = torch.nn.ModuleList(torch.nn.LayerNorm(D, eps=1e-6) for _ in range(norms))

    def has(self, name: str) -> bool:
        """Whether this is the fault."""
        return self.fault == name


def lines_of(module: torch.nn.Module, fault: str) -> set[str]:
    """The places of a fault in the code of a module, as ``file.py:line``."""
    file = (inspect.getsourcefile(type(module)) or "").rpartition("/")[2]
    found = set()
    for number, line in _lines({type(one) for one in module.modules() if isinstance(one, Faulty)}):
        shown = [name.strip() for name in line.partition("# shows:")[2].split(",")]
        if f'has("{fault}")' in line:
            found |= {f"{file}:{number}", f"{file}:{number + 1}"}
        elif fault in shown:
            found.add(f"{file}:{number}")
    return found


def _lines(classes: set[type]) -> Iterator[tuple[int, str]]:
    """Yield the lines of classes with their numbers."""
    for one in classes:
        lines, first = inspect.getsourcelines(one)
        yield from enumerate(lines, first)
