"""Compare the plan of a written rule file with the derivation, element by element, on drawn leaves."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.checkpoints.source import Leaf, Source
from convert.core.tensor_spec import TensorSpec
from convert.inference.derivation import Arithmetic, Derivation, Part, Tensor
from convert.layers.step_tensor import expected
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDING = 1e-12  # relative, of arithmetic in float64: 1 + scale, and a factor


class DrawnLeaves(Source):
    """A tree of random float64 leaves: two elements that are equal by chance are as good as impossible.

    Args:
        shapes: of the leaves, by name.
        root: of the leaves in the tree; their names are those below it.
    """

    format = "drawn"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], root: str = "", seed: int = 0) -> None:
        self.path = Path("drawn")
        shapes = {f"{root}/{name}" if root else name: shape for name, shape in shapes.items()}
        self.leaves = {
            name: Leaf(tuple(name.split("/")), TensorSpec(shape, "float64")) for name, shape in shapes.items()
        }
        rng = np.random.default_rng(seed)
        self._arrays = {name: np.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}

    def read(self, name: str) -> Array:
        return self._arrays[name]


@dataclass(frozen=True)
class Mismatch:
    """A tensor that the rules make otherwise than it was derived, or that they do not make.

    Attributes:
        tensor: its name.
        problem: what is wrong.
    """

    tensor: str
    problem: str


def compare_rules(
    text: str, derivation: Derivation, open_tensors: Collection[str] = (), root: str = ""
) -> list[Mismatch]:
    """Return where the plan of the rules differs from the derivation; empty: every element of every tensor is the same.

    Tensors that are computed from several leaves, or that have no parts, are not compared.

    Args:
        text: of the rules, without questions.
        derivation: with the leaves and tensors.
        open_tensors: tensors or modules that have no rule.
        root: of the leaves in the tree, as the rules have it.

    Raises:
        ConvertError: the rules are not valid, or do not fit the leaves.
    """
    source = DrawnLeaves(derivation.leaves, root)
    plan = make_plan(parse_rules(text), source)
    steps = {step.name: step for step in plan.steps}
    found = []
    for tensor in derivation.tensors:
        for name in (tensor.name, *tensor.also):
            step = steps.pop(name, None)
            if step is None:
                if name == tensor.name and not _zeros(tensor) and not _is_open(name, open_tensors):
                    found.append(Mismatch(name, "no rule makes it"))
                continue
            want = _derived(tensor, source, root)
            if want is None:
                continue
            got = expected(step, plan.source)
            if got.shape != tensor.shape:
                found.append(Mismatch(name, f"expected shape {list(tensor.shape)}, got {list(got.shape)}"))
                continue
            wrong = int(np.count_nonzero(~np.isclose(got.astype(np.float64), want, rtol=ROUNDING, atol=ROUNDING)))
            if wrong:
                found.append(Mismatch(name, f"{wrong} of {want.size} elements are others"))
    found += [
        Mismatch(name, "the target has no such tensor") for name in steps if not name.endswith("num_batches_tracked")
    ]
    return found


def _is_open(name: str, open_tensors: Collection[str]) -> bool:
    """Whether a tensor or its module, which may be one of a pattern, has no rule."""
    return any(re.fullmatch(_as_regex(of) + r"(\..*)?", name) for of in open_tensors)


def _as_regex(pattern: str) -> str:
    """Return what matches the names of a pattern's modules: an index is a number, alternatives are words."""
    parts = re.split(r"(\{[^{}]*\})", pattern)
    words = ("|".join(map(re.escape, part[1:-1].split(","))) if "," in part else r"[0-9]+" for part in parts[1::2])
    groups = [f"({word})" for word in words]
    return "".join(re.escape(text) + group for text, group in zip(parts[::2], [*groups, ""], strict=True))


def _zeros(tensor: Tensor) -> bool:
    return bool(tensor.parts) and all(p.arithmetic is Arithmetic.CONSTANT and p.factor == 0 for p in tensor.parts)


def _derived(tensor: Tensor, source: Source, root: str) -> Array | None:
    """Return the tensor as derived; None where it is computed from several leaves or not known."""
    if not tensor.parts or any(part.arithmetic is Arithmetic.COMPUTED for part in tensor.parts):
        return None
    prefix = f"{root}/" if root else ""
    leaves = {name: source.read(prefix + name) for part in tensor.parts if (name := part.leaf)}
    return assembled(tensor.parts, tensor.shape, leaves)


def assembled(parts: Sequence[Part], shape: tuple[int, ...], leaves: Mapping[str, Array]) -> Array:
    """Return the tensor that parts make of leaves, in float64."""
    made = np.full(shape, np.nan).ravel()
    for part in parts:
        if part.arithmetic is Arithmetic.CONSTANT:
            made[part.elements] = part.factor
            continue
        values = np.asarray(leaves[part.leaf], np.float64).ravel()[part.positions]
        plus = {Arithmetic.ONE_PLUS: 1.0, Arithmetic.MINUS_ONE: -1.0}.get(part.arithmetic, 0.0)
        made[part.elements] = (values + plus) * part.factor
    return made.reshape(shape)
