"""A mistake in one head, one block or one part of a tensor has the name that it has in the whole tensor, and says where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.layers.step_tensor import expected
from convert.layers.transforms.mistakes import DEINTERLEAVED, INTERLEAVED
from convert.planning.planner import make_plan
from convert.verify.weights.corruption.find import find_corruption
from convert.writing.written import open_written
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights

Array = np.ndarray[Any, np.dtype[Any]]
RANDOM = np.random.default_rng(0)
D, N, H = 16, 3, 6
HEAD = """model: m
title: M
targets: {torch: {loads: T}}
axes: {N: {is: heads}, H: {is: width}, K: {is: heads}, E: {is: heads, equals: N*H}}
facts: {count: 3}
products: {count*H: K}
"""
RULES = {
    "heads": ("- einsum: ...D,DNH->...NH\n  from: w\n  linear: l", (D, N, H)),
    "a number of heads": ("- einsum: ...D,DK->...K\n  from: w\n  linear: l", (D, N * H)),
    "a product": ("- einsum: ...D,DE->...E\n  from: w\n  linear: l\n- parameter: p\n  from: p\n  axes: NH", (D, N * H)),
}  # fmt: skip
HALVES = [0, 2, 4, 1, 3, 5]


def found(rules: str, leaves: dict[str, Array], name: str, change: Callable[[Array], object], folder: Path) -> Any:
    """The finding about a tensor that is changed."""
    plan = make_plan(rule_file(rules, HEAD), MemorySource(leaves))
    tensors = {step.name: np.ascontiguousarray(expected(step, plan.source)).copy() for step in plan.steps}
    change(tensors[name])
    save_file(tensors, folder / "out.safetensors")
    (finding,) = check_weights(plan, open_written(folder / "out.safetensors")).findings
    return finding


def rows(start: int, order: list[int]) -> Callable[[Array], None]:
    """Rows from one on, in another order."""

    def change(x: Array) -> None:
        x[start : start + len(order)] = x[start : start + len(order)][order]

    return change


ORDERS: dict[str, tuple[list[int], str, str]] = {
    "interleaved": (np.argsort(HALVES).tolist(), INTERLEAVED, "the RoPE pairs (0, 3) became (0, 1)"),
    "de-interleaved": (HALVES, DEINTERLEAVED, "pairs"),
    "reversed": (list(range(H))[::-1], "rows reversed", "the 6 rows are in the reverse order"),
    "rolled": ([5, 0, 1, 2, 3, 4], "rows rolled", "moved forward by 1"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", RULES)
def test_an_order_of_one_head(kind: str, order: str, tmp_path: Path) -> None:
    rules, shape = RULES[kind]
    leaves = {"w": RANDOM.standard_normal(shape).astype(np.float32)}
    if "from: p" in rules:
        leaves["p"] = RANDOM.standard_normal((N, H)).astype(np.float32)
    places, name, text = ORDERS[order]
    finding = found(rules, leaves, "l.weight", rows(H, places), tmp_path)
    assert finding.data["diagnosis"] == name and text in finding.problem
    assert "in the indices 6 to 11 of axis 0" in finding.problem and "head 1" in finding.problem


def test_a_block_of_a_block_diagonal_kernel(tmp_path: Path) -> None:
    def transpose(x: Array) -> None:
        x[1] = x[1].T.copy()

    rules = (
        '- einsum: ...NB,NBJ->...NJ\n  from: w\n  linear: {torch: {module: l, weight: w, einsum: "...NB,NBJ->...NJ"}}'
    )
    finding = found(rules, {"w": RANDOM.standard_normal((3, 8, 8)).astype(np.float32)}, "l.w", transpose, tmp_path)
    assert finding.data["diagnosis"] == "axes permuted"
    assert "in index 1 of axis 0 alone, expected laid out as N B J, got laid out as N J B" in finding.problem


def test_a_block_of_any_tensor() -> None:
    """The transposed block is a matrix, and not values of another shape."""
    want = RANDOM.standard_normal((3, 8, 8)).astype(np.float32)
    got = want.copy()
    got[1] = want[1].T
    corruption = find_corruption(got, want)
    assert corruption is not None and corruption.name == "transposed"
    assert corruption.description == "in index 1 of axis 0: the matrix is transposed"


def test_a_head_of_a_part_of_a_fused_tensor(tmp_path: Path) -> None:
    rules = "- einsum: ...D,DNH->...NH\n  from: a/{q,k}\n  linear: {torch: l}"
    leaves = {name: RANDOM.standard_normal((D, N, H)).astype(np.float32) for name in ("a/q", "a/k")}
    finding = found(rules, leaves, "l.weight", rows(N * H + H, np.argsort(HALVES).tolist()), tmp_path)
    assert finding.data["diagnosis"] == INTERLEAVED
    assert "in its part 18 to 35, from a/k, in the indices 6 to 11 of axis 0" in finding.problem
