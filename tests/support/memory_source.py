"""A checkpoint in memory, a dict of name -> array; rules from a few lines; and a plan run on it in the plainest way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from convert import Plan, RuleFile, parse_rules
from convert.checkpoints.source import Leaf, Source
from convert.core import ops
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.layers.target import Numbers
from convert.writing.execute import computed


class MemorySource(Source):
    """A tree of arrays. Names are keys joined with ``/``."""

    format = "memory"

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.path = Path("/memory")
        self.arrays = arrays
        self.leaves = {
            name: Leaf(tuple(name.split("/")), TensorSpec(x.shape, x.dtype.name)) for name, x in arrays.items()
        }

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


HEAD = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\n"  # three lines: `rules:` is line 4, the first rule line 5


def rule_file(rules: str, head: str = HEAD) -> RuleFile:
    """A rule file called ``r.yaml`` with these rules, given as a YAML list."""
    return parse_rules(f"{head}rules:\n{rules.strip()}\n", "r.yaml")


def zeros(**specs: tuple[int, ...]) -> dict[str, np.ndarray]:
    """A tree of float32 zeros by name -> shape, for plans that nobody runs."""
    return {name: np.zeros(shape, np.float32) for name, shape in specs.items()}


def run(plan: Plan) -> dict[str, np.ndarray]:
    """The output tensors, each part's operations applied, and the spec that the plan promised checked."""
    out = {}
    for step in plan.steps:
        if step.value is not None:
            if isinstance(step.value, float | Numbers):
                out[step.name] = computed(step)
            continue
        result = np.empty(step.spec.shape, numpy_dtype(step.spec.dtype))
        filled = 0
        for part in step.parts:
            moved = ops.apply(part.ops, plan.source.read(part.leaf))
            rows = part.share(result)
            assert (moved.shape, moved.dtype) == (rows.shape, rows.dtype), (step, part)
            rows[...] = moved
            filled += moved.size
        assert filled == step.spec.size, step
        out[step.name] = result
    return out
