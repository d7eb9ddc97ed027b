"""Say which cell of the source a layer of ``torch.nn.GRU``, ``LSTM`` or ``RNN``, or of our own GRU, is: by its name in its library, or by its equations.

A name alone decides nothing: the rule is planned, and its tensors are compared with the derived ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.core.path_pattern import escape_path
from convert.inference.derivation import Arithmetic, Tensor
from convert.inference.rule_file.drawn import DrawnLeaves, derived_array
from convert.inference.rule_file.layers.layout import MAX_PARTS, runs_of
from convert.layers.draft import flow
from convert.layers.recurrent.equations import EQUATIONS, GATES, RESETS, TENSORS, UNRESET
from convert.layers.recurrent.library_cells import CELLS, NEW, named_cell
from convert.layers.step_tensor import expected
from convert.planning.facts.settings import settable
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules

Array = np.ndarray[Any, np.dtype[Any]]
KINDS = tuple(GATES)
TENSOR = re.compile(rf"({'|'.join(TENSORS)})(?:_(l[0-9]+(?:_reverse)?))?")
ARGUMENTS = ("", "(use_bias=False)", "(double_bias=False)", "(residual=True)")
FORGET = "sigmoid(W x + U h + b + 1)"


@dataclass(frozen=True)
class NamedCell:
    """The cell of one layer in one direction.

    Attributes:
        start: path that the leaves of the cell lie below.
        keys: ``cell`` and, for one by its equations, ``leaves``, as YAML.
        inputs: (start, length) of the runs of the source's inputs, in the target's order; none if it is the same.
    """

    start: str
    keys: tuple[tuple[str, str], ...]
    inputs: tuple[tuple[int, int], ...] = ()


def layers_of(names: Sequence[str]) -> dict[str, list[str]]:
    """Group the tensors of a recurrent module by layer and direction: ``l0``, ``l0_reverse``; without one for a single step."""
    found: dict[str, list[str]] = {}
    for name in names:
        if match := TENSOR.fullmatch(name):
            found.setdefault(match[2] or "", []).append(name)
    return found


def name_cell(
    kind_name: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], facts: Mapping[str, Any]
) -> NamedCell | None:
    """Name the cell that gives these tensors; None where the rule language has none.

    Args:
        kind_name: ``gru``, ``lstm`` or ``rnn``.
        tensors: by their names without the layer, such as ``weight_ih``.
        shapes: of the source's leaves.
        facts: of the layer: the activation of an RNN, where the reset gate of a GRU stands.
    """
    activation, reset = str(facts.get("activation", "tanh")), str(facts.get("reset", "after"))
    tensors, inputs = _with_inputs_in_order(tensors, shapes)
    used = list(dict.fromkeys(part.leaf for tensor in tensors.values() for part in tensor.parts if part.leaf))
    biased = "bias_ih" in tensors
    for start, keys in _proposals(kind_name, tensors, used, shapes, activation, reset):
        if start and _gives(kind_name, start, keys, {leaf: shapes[leaf] for leaf in used}, tensors, biased):
            return NamedCell(start, keys, inputs)
    return None


@dataclass(frozen=True)
class OfStack:
    """The tensors of one cell, of leaves that have several in a stack along their first axis.

    Attributes:
        tensors: with positions in the leaves without that axis.
        shapes: of these leaves.
        count: so many cells are in the stack.
        number: of this one.
    """

    tensors: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    count: int
    number: int


def of_stack(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> OfStack | None:
    """Return the tensors as those of one cell of a stack; None where its leaves are no stack, or more than one cell is in them."""
    used = {part.leaf for tensor in tensors.values() for part in tensor.parts if part.leaf}
    counts = {shapes[leaf][:1] for leaf in used}
    if len(counts) != 1 or not (count := math.prod(counts.pop())) > 1 or any(len(shapes[leaf]) < 2 for leaf in used):
        return None
    sizes = {leaf: math.prod(shapes[leaf][1:]) for leaf in used}
    parts = [part for tensor in tensors.values() for part in tensor.parts if part.leaf]
    numbers = {int(n) for part in parts for n in np.unique(part.positions // sizes[part.leaf])}
    if len(numbers) != 1:
        return None
    one = {
        role: replace(
            tensor,
            parts=tuple(
                replace(part, positions=part.positions % sizes[part.leaf]) if part.leaf else part
                for part in tensor.parts
            ),
        )
        for role, tensor in tensors.items()
    }
    return OfStack(one, {leaf: shapes[leaf][1:] for leaf in used}, count, numbers.pop())


def _with_inputs_in_order(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Mapping[str, Tensor], tuple[tuple[int, int], ...]]:
    """Return the tensors with the columns of the input in the source's order, and the runs that they have in the target's."""
    weight = tensors.get("weight_ih")
    if weight is None or len(weight.shape) != 2:
        return tensors, ()
    part, width = weight.parts[0], weight.shape[1]
    row = np.flatnonzero(part.elements // width == part.elements[0] // width)
    columns = part.elements[row] % width
    places = np.unravel_index(part.positions[row], shapes[part.leaf])
    varying = [place for place in places if len(np.unique(place)) == width]
    if len(row) != width or len(varying) != 1:
        return tensors, ()
    order = varying[0][np.argsort(columns)] - varying[0].min()
    runs = runs_of(order)
    if len(runs) == 1 or len(runs) > MAX_PARTS or not np.array_equal(np.sort(order), np.arange(width)):
        return tensors, ()
    moved = [replace(p, elements=p.elements // width * width + order[p.elements % width]) for p in weight.parts]
    return {**tensors, "weight_ih": replace(weight, parts=tuple(moved))}, runs


def _proposals(
    kind_name: str,
    tensors: Mapping[str, Tensor],
    used: Sequence[str],
    shapes: Mapping[str, Any],
    activation: str,
    reset: str,
) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    for name in _names(kind_name, activation):
        cell = named_cell(name, kind_name)
        if cell.reset != reset:
            continue
        starts = {
            leaf.removesuffix(path).rstrip("/")
            for leaf in used[:1]
            for path in cell.leaves
            if leaf.endswith(f"/{path}")
        }
        for start in sorted(starts):
            paths = {leaf.removeprefix(f"{start}/") for leaf in used}
            if cell.leaves.keys() - cell.may_lack <= paths <= cell.leaves.keys():
                yield start, (("cell", name),)
    yield from _by_equations(kind_name, tensors, used, shapes, activation, reset)


def _names(kind_name: str, activation: str) -> Iterator[str]:
    """Yield the cells of the libraries, those without arguments first."""
    for arguments in ARGUMENTS:
        for name in CELLS:
            for more in ("", f"activation={activation}", f"activation_fn={activation}"):
                given = ", ".join(filter(None, (arguments.strip("()"), more)))
                text = f"{name}({given})" if given else name
                try:
                    cell = named_cell(text, kind_name)
                except ValueError:
                    continue
                if kind_name != "rnn" or cell.activation == activation:
                    yield text
                    break


def _by_equations(
    kind_name: str,
    tensors: Mapping[str, Tensor],
    used: Sequence[str],
    shapes: Mapping[str, Any],
    activation: str,
    reset: str,
) -> Iterator[tuple[str, tuple[tuple[str, str], ...]]]:
    """Yield the cell by torch's equations, with what each leaf holds read off the derivation."""
    factors = {part.factor for tensor in tensors.values() for part in tensor.parts}
    if not factors <= {0.0, 1.0, *([-1.0] if kind_name == "gru" else [])}:
        return
    start = "/".join(_common([leaf.split("/")[:-1] for leaf in used]))
    order = UNRESET if reset == "none" else GATES[kind_name]
    held = {leaf: _held(order, leaf, shapes[leaf], tensors) for leaf in used}
    if None in held.values():
        return
    said = dict(EQUATIONS[kind_name])
    if kind_name == "rnn":
        said = {"h": said["h"].replace("tanh", activation)}
    if kind_name == "gru":
        said["n"] = RESETS[reset]
    if kind_name == "gru" and -1.0 in factors:  # sigmoid(-x) = 1 - sigmoid(x)
        said["h"] = NEW
    if kind_name == "lstm":
        plus = any(part.arithmetic is Arithmetic.ONE_PLUS for tensor in tensors.values() for part in tensor.parts)
        said = {"f": FORGET} if plus else {"c": said["c"]}
    cell = ", ".join(f"{key}: {flow(value)}" for key, value in said.items())
    leaves = ", ".join(f"{flow(leaf.removeprefix(f'{start}/'))}: {flow(str(text))}" for leaf, text in held.items())
    yield start, (("cell", f"{{{cell}}}"), ("leaves", f"{{{leaves}}}"))


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    found = []
    for steps in zip(*paths, strict=False):
        if len(set(steps)) > 1:
            break
        found.append(steps[0])
    return found


def _held(order: Sequence[str], leaf: str, shape: tuple[int, ...], tensors: Mapping[str, Tensor]) -> str | None:
    """Return what a leaf holds, as a rule says it: ``W [I, zrn]``; None where it is laid out in another way."""
    found: dict[str, dict[int, str]] = {}  # W, U, b or c -> place in the leaf -> gate
    axis_of_gates: set[int] = set()
    for role, letter in TENSORS.items():
        for gate, index in _gates(order, leaf, shape, tensors.get(role)):
            at = _axis_of_rows(index)
            if at is None:
                return None
            axis_of_gates.add(at)
            hidden = len(index[at])
            found.setdefault(letter, {})[int(index[at].min()) // hidden] = gate
    orders = {"".join(gate for _, gate in sorted(places.items())) for places in found.values()}
    if len(orders) != 1 or len(axis_of_gates) != 1:
        return None
    gates, at = orders.pop(), axis_of_gates.pop()
    parts = sorted(found, key="WUbc".index)
    others = {("W",): ["I"], ("U",): ["H"], ("W", "U"): ["I+H"], ("b",): [], ("c",): [], ("b", "c"): ["2"]}
    axes = others.get(tuple(parts))
    if axes is None or len(axes) + 1 != len(shape):
        return None
    axes.insert(at, gates)
    return f"{' '.join(parts)} [{', '.join(axes)}]"


def _gates(
    order: Sequence[str], leaf: str, shape: tuple[int, ...], tensor: Tensor | None
) -> Iterator[tuple[str, tuple[Array, ...]]]:
    """Yield the gates of a tensor that come from a leaf, with the position of each element, [rows, columns], along its axes."""
    if tensor is None:
        return
    flat = np.full(int(np.prod(tensor.shape)), -1)
    for part in tensor.parts:
        if part.leaf == leaf:
            flat[part.elements] = part.positions
    for gate, block in zip(order, np.split(flat.reshape(tensor.shape[0], -1), len(order)), strict=True):
        if (block >= 0).all():
            yield gate, tuple(np.unravel_index(block, shape))


def _axis_of_rows(index: Sequence[Array]) -> int | None:
    """Return the axis of the leaf along which the rows of a gate lie in their order; None if there is none."""
    for axis, column in enumerate(index):
        rows = column[:, 0]
        if (column == column[:, :1]).all() and np.array_equal(rows, rows[0] + np.arange(len(rows))):
            return axis
    return None


def _gives(
    kind_name: str,
    start: str,
    keys: Sequence[tuple[str, str]],
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    biased: bool,
) -> bool:
    """Whether a rule makes these tensors, element by element."""
    target = "m" if biased else "{module: m, bias: false}"
    said = "".join(f"  {key}: {value}\n" for key, value in keys)
    text = f"model: m\ntitle: m\ntargets:\n  torch: {{loads: m}}\nrules:\n- {kind_name}: {target}\n  from: {flow(escape_path(start))}\n{said}"
    source = DrawnLeaves(shapes)
    try:
        plan = plan_of(text, source)
    except ConvertError:
        return False
    made = {step.role: expected(step, plan.source) for step in plan.steps}
    derived = {role: derived_array(tensor, source) for role, tensor in tensors.items()}
    if made.keys() != derived.keys() or any(array is None for array in derived.values()):
        return False
    one, two = sums(kind_name, made), sums(kind_name, {role: a for role, a in derived.items() if a is not None})
    return all(one[role].shape == two[role].shape and np.allclose(one[role], two[role], rtol=1e-12) for role in one)


def plan_of(text: str, source: DrawnLeaves) -> Plan:
    """Plan rules; those of a cell that only our own module computes, too, as they are written for no other module.

    Raises:
        ConvertError: the rules are not valid, or do not fit the leaves.
    """
    rules = parse_rules(text)
    return make_plan(rules, source, settings={"custom_cells": True} if "custom_cells" in settable(rules) else {})


def sums(kind_name: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the tensors of a layer with its two biases added up, where torch uses no more than their sum.

    It uses both in the candidate `n` of a GRU, whose second bias is multiplied by the reset gate.
    """
    found = dict(tensors)
    if "bias_ih" in found:
        b, c = (np.array(found[role], np.float64) for role in ("bias_ih", "bias_hh"))
        summed = np.ones(len(b), bool)
        if kind_name == "gru":
            summed[2 * len(b) // 3 :] = False
        b[summed] += c[summed]
        c[summed] = 0
        found["bias_ih"], found["bias_hh"] = b, c
    return found
