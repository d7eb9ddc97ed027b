"""A tensor that is made of other tensors of its layer: their rows, the mean of its heads, a bias that is folded in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.layers.step_tensor import expected
from convert.planning.planner import make_plan
from convert.verify.weights.folded import BIAS, SCALE
from convert.verify.weights.rows_of_others import A_ROW, AVERAGED, IN_A_ROW, SEVERAL
from convert.writing.written import open_written
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]
D, F = 8, 12
HEAD = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\n"
RULES = """\
- einsum: ...D,DF->...F
  from: l{i}/{gate,up}
  linear: l.{i}.{gate,up}
- einsum: ...F,FE->...E
  from: l{i}/down
  bias: l{i}/down_bias
  linear: l.{i}.down
- from: l{i}/scale
  bias: l{i}/shift
  mean: l{i}/mean
  var: l{i}/var
  multiplies_by: scale
  epsilon: 1e-5
  axes: F
  batch_norm: l.{i}.norm
- from: l{i}/types
  axes: UF
  embedding: l.{i}.types
- from: l{i}/positions
  axes: VF
  embedding: l.{i}.positions
- from: l{i}/token
  axes: ..F
  parameter: {name: "l.{i}.token", axes: ..F}
- from: l{i}/grid
  axes: .VF
  parameter: {name: "l.{i}.grid", axes: .VF}
"""
RANDOM = np.random.default_rng(0)
SHAPES = {"gate": (D, F), "up": (D, F), "down": (F, D + 2), "down_bias": (D + 2,), "types": (2, F), "positions": (9, F)}
SHAPES |= {"token": (1, 1, F), "grid": (1, 9, F)}
SHAPES |= dict.fromkeys(("scale", "shift", "mean", "var"), (F,))


def in_turns(x: Tensors) -> None:
    both = np.stack([x["l.1.gate.weight"], x["l.1.up.weight"]], 1).reshape(2 * F, D)
    x["l.1.gate.weight"], x["l.1.up.weight"] = both[:F], both[F:]


def in_blocks(x: Tensors) -> None:
    both = np.concatenate([x["l.1.gate.weight"].reshape(2, 6, D), x["l.1.up.weight"].reshape(2, 6, D)], 1)
    x["l.1.gate.weight"], x["l.1.up.weight"] = both.reshape(2 * F, D)[:F], both.reshape(2 * F, D)[F:]


def averaged(name: str, blocks: int, group: int) -> Callable[[Tensors], None]:
    def change(x: Tensors) -> None:
        split = x[name].reshape(blocks // group, group, -1, x[name].shape[1])
        x[name] = np.broadcast_to(split.mean(1, keepdims=True), split.shape).reshape(x[name].shape)

    return change


def added(name: str, what: Callable[[Tensors], Array]) -> Callable[[Tensors], None]:
    def change(x: Tensors) -> None:
        x[name] = x[name] + what(x)

    return change


def normed(x: Tensors) -> None:
    factor = x["l.1.norm.weight"] / np.sqrt(x["l.1.norm.running_var"] + np.float32(1e-5))
    x["l.1.gate.weight"] = x["l.1.gate.weight"] * factor[:, None]


CASES: dict[str, tuple[Callable[[Tensors], None], str, str]] = {
    "in turns": (in_turns, SEVERAL, "along axis 0, it holds row 0 of gate.weight, row 0 of up.weight, row 1 of gate.weight, row 1 of up.weight, ..."),
    "in blocks": (in_blocks, SEVERAL, "along axis 0, it holds rows 0 to 5 of gate.weight, rows 0 to 5 of up.weight"),
    "heads averaged": (averaged("l.1.gate.weight", 3, 3), AVERAGED, "the 3 blocks of 4 along axis 0 are each the mean of these blocks"),
    "heads averaged in groups": (averaged("l.1.gate.weight", 4, 2), AVERAGED, "2 blocks that follow each other, of 4 in all, of 3 along axis 0 are each the mean of these blocks"),
    "a bias through a weight": (added("l.1.down.bias", lambda x: x["l.1.down.weight"] @ x["l.1.norm.bias"]), BIAS, "l.1.down.weight times l.1.norm.bias is added to it"),
    "a bias through a weight, subtracted": (added("l.1.down.bias", lambda x: -x["l.1.down.weight"] @ x["l.1.norm.running_mean"]), BIAS, "l.1.down.weight times l.1.norm.running_mean is subtracted from it"),
    "a row of a table": (added("l.1.positions.weight", lambda x: x["l.1.types.weight"][1]), BIAS, "row 1 of l.1.types.weight is added to each of its vectors along axis 1"),
    "a row of a long table": (added("l.1.norm.bias", lambda x: -x["l.1.positions.weight"][7]), BIAS, "row 7 of l.1.positions.weight is subtracted from it"),
    "the position of a class token": (added("l.1.token", lambda x: x["l.1.grid"][:, :1]), BIAS, "row 0 of l.1.grid is added to each of its vectors along axis 2"),
    "a batch norm": (normed, SCALE, "axis 0 is multiplied by l.1.norm.weight / sqrt(l.1.norm.running_var + 1e-05)"),
}  # fmt: skip


def problems(change: Callable[[Tensors], None], folder: Path) -> dict[str, str]:
    """What the weights level says: name of the mistake -> description of the first tensor."""
    leaves = {f"l{i}/{key}": RANDOM.normal(size=shape).astype(np.float32) for i in range(2) for key, shape in SHAPES.items()}  # fmt: skip
    leaves |= {name: np.abs(x) + 1 for name, x in leaves.items() if name.endswith("/var")}
    plan = make_plan(rule_file(RULES, HEAD), MemorySource(leaves))
    tensors = {step.name: np.array(expected(step, plan.source), order="C") for step in plan.steps}
    change(tensors)
    save_file({name: np.array(x, order="C") for name, x in tensors.items()}, folder / "out.safetensors")
    findings = check_weights(plan, open_written(folder / "out.safetensors")).findings
    return {finding.data["diagnosis"]: finding.problem.partition(";")[0] for finding in findings}


@pytest.mark.parametrize("case", CASES)
def test_what_it_is_made_of_is_named(case: str, tmp_path: Path) -> None:
    change, name, text = CASES[case]
    assert problems(change, tmp_path) == {name: text}


def exchanged_with_a_row(x: Tensors, row: int) -> None:
    x["l.1.norm.bias"], x["l.1.positions.weight"][row] = (
        x["l.1.positions.weight"][row].copy(),
        x["l.1.norm.bias"].copy(),
    )


def test_a_tensor_and_a_row_of_a_table_have_each_others_place(tmp_path: Path) -> None:
    assert problems(lambda x: exchanged_with_a_row(x, 3), tmp_path) == {
        A_ROW: "it holds what belongs to index 3 of axis 0 of l.1.positions.weight",
        IN_A_ROW: "in index 3 of axis 0, it holds what belongs to l.1.norm.bias",
    }


def test_a_row_and_a_tensor_of_other_values_are_not_named(tmp_path: Path) -> None:
    def change(x: Tensors) -> None:
        exchanged_with_a_row(x, 3)
        x["l.1.norm.bias"][0] += 1
        x["l.1.positions.weight"][3, 0] += 1

    assert not {A_ROW, IN_A_ROW} & set(problems(change, tmp_path))


def test_unrelated_rows_are_not_named(tmp_path: Path) -> None:
    """One row that is no row of the layer: nothing is claimed about the others."""

    def change(x: Tensors) -> None:
        in_turns(x)
        for name in ("l.1.gate.weight", "l.1.up.weight"):
            x[name] = np.concatenate([x[name][:-1], RANDOM.normal(size=(1, D)).astype(np.float32)])

    assert SEVERAL not in problems(change, tmp_path)
