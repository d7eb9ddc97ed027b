"""Compare the plan of a written rule file with the derivation, element by element, on drawn leaves."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from convert.inference.derivation import Arithmetic, Derivation
from convert.inference.rule_file.complex_tensors import in_complex_numbers
from convert.inference.rule_file.drawn import Array, DrawnLeaves, derived_array
from convert.inference.rule_file.layers.cells import KINDS, plan_of, sums
from convert.inference.rule_file.printing.buffers import ROUNDING as BUFFER_ROUNDING
from convert.layers.step_tensor import expected
from convert.writing.execute import computed

FRESH = 1e-9  # relative to the largest element: what the source computes of leaves, and what a rule does
ROUNDING = 1e-12  # relative, of arithmetic in float64: 1 + scale, and a factor


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

    Tensors that have no parts are not compared.

    Args:
        text: of the rules, without questions.
        derivation: with the leaves and tensors.
        open_tensors: tensors or modules that have no rule.
        root: of the leaves in the tree, as the rules have it.

    Raises:
        ConvertError: the rules are not valid, or do not fit the leaves.
    """
    derivation, _ = in_complex_numbers(derivation)
    source = DrawnLeaves(derivation.leaves, root, derivation.weights)
    plan = plan_of(text, source)
    steps = {step.name: step for step in plan.steps}
    found = []
    pairs: dict[str, tuple[Array, Array]] = {}  # name -> what the rules make, what was derived
    for tensor in derivation.tensors:
        for name in (tensor.name, *tensor.also):
            step = steps.get(name)
            if step is None:
                if name == tensor.name and not is_open(name, open_tensors):
                    found.append(Mismatch(name, "no rule makes it"))
                continue
            want = derived_array(tensor, source, root)
            if want is None:
                continue
            got = expected(step, plan.source) if step.value is None else computed(step)
            if got.shape != tensor.shape:
                found.append(Mismatch(name, f"expected shape {list(tensor.shape)}, got {list(got.shape)}"))
                continue
            pairs[name] = got.astype(want.dtype), want
    for name, numbers in derivation.buffers.items():
        step = steps.get(name)
        if step is None:
            if not is_open(name, open_tensors):
                found.append(Mismatch(name, "no rule makes it"))
        elif (got := computed(step)).dtype != numbers.dtype or not np.array_equal(got, numbers):
            found.append(Mismatch(name, "its rule would write other numbers"))
    _add_up(pairs, {name: step.kind_name for name, step in steps.items()})
    for name, (got, want) in pairs.items():
        rounding = BUFFER_ROUNDING if derivation.tensor(name).is_own else ROUNDING
        wrong = int(np.count_nonzero(~np.isclose(got, want, rtol=rounding, atol=rounding)))
        if wrong:
            found.append(Mismatch(name, f"its rule would write another number for {wrong} of {want.size} elements"))
    wrong_already = {one.tensor for one in found}
    found += [one for one in _on_fresh_leaves(text, derivation, root) if one.tensor not in wrong_already]
    known = {name for tensor in derivation.tensors for name in (tensor.name, *tensor.also)} | derivation.buffers.keys()
    return found + [
        Mismatch(name, "the target has no such tensor")
        for name in steps
        if name not in known and not name.endswith("num_batches_tracked")
    ]


def _on_fresh_leaves(text: str, derivation: Derivation, root: str) -> Iterator[Mismatch]:
    """Yield where the rules make something else of fresh leaves, of the tensors that are computed from leaves: a number of the rules may be one of the first draw."""
    fresh = derivation.proof
    computed_ = {t.name for t in derivation.tensors if any(p.arithmetic is Arithmetic.COMPUTED for p in t.parts)}
    if fresh is None or not fresh.leaves or not computed_ or derivation.complex_leaves or derivation.complex_tensors:
        return
    plan = plan_of(text, DrawnLeaves(derivation.leaves, root, fresh.leaves))
    for step in plan.steps:
        want = fresh.tensors.get(step.name)
        if step.name not in computed_ or want is None or step.value is not None:
            continue
        got = expected(step, plan.source)
        known = ~np.isnan(want)
        slack = FRESH * np.abs(want[known]).max(initial=0)
        wrong = int((np.abs(got - want)[known] > slack).sum()) if got.shape == want.shape else want.size
        if wrong:
            yield Mismatch(
                step.name, f"of other leaves, its rule would write another number for {wrong} of {want.size} elements"
            )


def _add_up(pairs: dict[str, tuple[Array, Array]], kinds: Mapping[str, str]) -> None:
    """Replace the two biases of a recurrent layer by their sum, where torch computes with no more than that."""
    for name in list(pairs):
        other = re.sub(r"\bbias_ih(?=_l|$)", "bias_hh", name)  # a cell names no layer
        if other != name and other in pairs and kinds[name] in KINDS:
            ours, theirs = (sums(kinds[name], {"bias_ih": pairs[name][k], "bias_hh": pairs[other][k]}) for k in (0, 1))
            pairs[name], pairs[other] = ((ours[role], theirs[role]) for role in ("bias_ih", "bias_hh"))


def is_open(name: str, open_tensors: Collection[str]) -> bool:
    """Whether a tensor or its module, which may be one of a pattern, has no rule."""
    return name in open_tensors or any(re.fullmatch(_as_regex(of) + r"(\..*)?", name) for of in open_tensors)


def _as_regex(pattern: str) -> str:
    """Return what matches the names of a pattern's modules: an index is a number, or has names; alternatives are words."""
    parts = re.split(r"(\{[^{}]*\})", pattern)
    listed = (re.sub(r"^[a-z]:", "", part[1:-1]) for part in parts[1::2])
    words = ("|".join(map(re.escape, text.split(","))) if "," in text else r"[0-9]+" for text in listed)
    groups = [f"({word})" for word in words]
    return "".join(re.escape(text) + group for text, group in zip(parts[::2], [*groups, ""], strict=True))
