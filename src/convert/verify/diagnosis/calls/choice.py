"""Search for another number of largest values: run the whole model with each number at each line that chooses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from convert.programs.divergence.naming.operands import LARGEST
from convert.programs.where import model_line, stack
from convert.references.protocol import Reference
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.whole_model import run_again
from convert.verify.sides.records import USER_FAILS

CHOICES = (torch.topk, torch.Tensor.topk)
MOST = 16  # values that a choice may take in a trial


class _Choosing(TorchFunctionMode):
    """Takes other numbers of largest values.

    Attributes:
        other: line of the model's code -> how many it takes.
        seen: line -> how many it took, and of how many.
    """

    def __init__(self, other: Mapping[str, int]) -> None:
        super().__init__()
        self.other = other
        self.seen: dict[str, tuple[int, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in CHOICES:
            given |= zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)
            line = model_line(stack(sys._getframe()))
            self.seen[line] = int(given["k"]), given["input"].shape[given.get("dim", -1)]
            given["k"] = self.other.get(line, given["k"])
            return torch.topk(**given)
        return func(*args, **given)


def other_choice(site: Site, reference: Reference) -> Search:
    """Search for the number of largest values with which the outputs are the JAX model's."""
    with _Choosing({}) as own:
        run_again(site, reference)
    for line, (count, size) in own.seen.items():
        for other in (k for k in range(1, min(size, MOST) + 1) if k != count):
            try:
                with _Choosing({line: other}):
                    error = site.error(run_again(site, reference))
            except USER_FAILS:  # what follows takes no other number
                continue
            if error <= site.enough:
                problem = f"the target takes the {count} largest of {size} values ({line}), and the JAX model the {other} largest"
                fix = f"let {line} take the {other} largest: compare the fact, or the setting of the target's configuration, that says how many"
                return Search(Explanation(LARGEST, problem, "", fix, error))
    return Search(ruled_out=(LARGEST,) if own.seen else ())
