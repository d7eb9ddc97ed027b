"""Recurrent cells from the tensors of torch's layers alone: each cell of each library, layers, directions and stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert import RuleError
from convert.layers.recurrent import library_cells
from convert.layers.recurrent.equations import Cell
from convert.planning.planner import make_plan
from convert.reversing.source import ReversedSource
from support.memory_source import MemorySource, rule_file, run

INPUTS, HIDDEN = 3, 5
ARGUMENTS = (
    "flax.linen.MGUCell(reset_gate=False)",
    "flax.linen.SimpleCell(residual=True)",
    "flax.nnx.SimpleCell(residual=True)",
    "equinox.nn.GRUCell(use_bias=False)",
    "equinox.nn.LSTMCell(use_bias=False)",
    "haiku.VanillaRNN(double_bias=False)",
    "keras.layers.GRU(reset_after=False)",
    "keras.layers.GRU(use_bias=False)",
)
ROUNDED = ("haiku.LSTM", "residual=True")  # 1 is added, so that several values of a leaf give the same tensor


def cell_of(name: str) -> tuple[str, Cell]:
    for word in ("gru", "lstm", "rnn"):
        try:
            return word, library_cells.named_cell(name, word)
        except ValueError:
            continue
    raise AssertionError(name)


def tree_of(cell: Cell, place: str, rng: np.random.Generator, inputs: int = INPUTS) -> dict[str, np.ndarray]:
    sizes = {"I": inputs, "H": HIDDEN, "I+H": inputs + HIDDEN, "2": 2}
    return {
        f"{place}/{path}": rng.standard_normal([sizes.get(axis, len(axis) * HIDDEN) for axis in held.axes]).astype("f4")
        for path, held in cell.leaves.items()
        if path not in cell.may_lack
    }


def comes_back(rules: convert.RuleFile, tree: dict[str, np.ndarray], folder: Path, **said: Any) -> None:
    first, second = folder / "first.safetensors", folder / "second.safetensors"
    convert.convert(rules, MemorySource(tree), first, settings=said)
    save_file(load_file(first), first)  # as other code writes it
    source = ReversedSource(convert.plan_reverse(rules, first, settings=said))
    source.check_constants()
    leaves = {name: source.read(name) for name in source.leaves}
    assert leaves.keys() == tree.keys()
    for name, x in tree.items():
        assert (leaves[name].shape, leaves[name].dtype) == (x.shape, x.dtype), name
        assert leaves[name].tobytes() == x.tobytes() or any(word in str(rules.rules) for word in ROUNDED), name
    convert.convert(rules, MemorySource(leaves), second, settings=said)
    one, two = load_file(first), load_file(second)
    assert one.keys() == two.keys() and all(one[name].tobytes() == two[name].tobytes() for name in one)


def test_a_module_for_one_step_has_no_layer_in_its_names(tmp_path: Path) -> None:
    rules = rule_file("- lstm: {module: step, layer: none}\n  cell: haiku.LSTM\n  from: c")
    tree = tree_of(library_cells.named_cell("haiku.LSTM", "lstm"), "c", np.random.default_rng(0))
    made = run(make_plan(rules, MemorySource(tree)))
    assert list(made) == ["step.weight_ih", "step.weight_hh", "step.bias_ih", "step.bias_hh"]
    layers = run(make_plan(rule_file("- lstm: step\n  cell: haiku.LSTM\n  from: c"), MemorySource(tree)))
    for name, values in made.items():
        np.testing.assert_array_equal(values, layers[f"{name}_l0"])
    comes_back(rules, tree, tmp_path)


def test_a_module_for_one_step_has_no_direction() -> None:
    with pytest.raises(RuleError, match="no direction"):
        rule_file("- lstm: {module: step, layer: none, direction: backward}\n  cell: haiku.LSTM\n  from: c")


@pytest.mark.parametrize("name", [*library_cells.CELLS, *ARGUMENTS])
def test_every_cell(name: str, tmp_path: Path) -> None:
    """Two layers in both directions, of other widths, beside a table whose width a letter shares with the input."""
    word, cell = cell_of(name)
    rng, tree = np.random.default_rng(0), {"table": np.ones((7, INPUTS), "f4")}
    for layer in range(2):
        for way in ("forward", "backward"):
            tree |= tree_of(cell, f"rnn_{layer}/{way}", rng, INPUTS if layer == 0 else 2 * HIDDEN)
    rules = rule_file(f"""
- {word}: {{module: net.rnn, layer: "{{k}}", direction: "{{forward,backward}}"}}
  cell: {name}
  from: rnn_{{k}}/{{forward,backward}}
- {{from: table, axes: VD, embedding: words}}
""")
    comes_back(rules, tree, tmp_path, **({"custom_cells": True} if cell.module else {}))


@pytest.mark.parametrize("name", ["flax.linen.GRUCell", "flax.nnx.OptimizedLSTMCell", "haiku.VanillaRNN"])
def test_a_stack_of_layers(name: str, tmp_path: Path) -> None:
    word, cell = cell_of(name)
    rng = np.random.default_rng(1)
    layers = [tree_of(cell, "cells", rng, HIDDEN) for _ in range(3)]
    rules = rule_file(f'- {word}: {{module: rnn, layer: "{{k}}"}}\n  cell: {name}\n  stacked: {{k: 0}}\n  from: cells')
    comes_back(rules, {path: np.stack([layer[path] for layer in layers]) for path in layers[0]}, tmp_path)


@pytest.mark.parametrize("name", [*library_cells.CELLS, *ARGUMENTS])
def test_weights_that_torch_trained(name: str, tmp_path: Path) -> None:
    """torch's layer has two biases. A cell with one for both is refused with what to do; one with both gives the same bytes."""
    word, cell = cell_of(name)
    rng, rows = np.random.default_rng(2), len(cell.order) * HIDDEN
    shapes = {"weight_ih": (rows, INPUTS), "weight_hh": (rows, HIDDEN), "bias_ih": (rows,), "bias_hh": (rows,)}
    file = tmp_path / "in.safetensors"
    save_file({f"rnn.{end}_l0": rng.standard_normal(shape).astype("f4") for end, shape in shapes.items()}, file)
    rules, said = rule_file(f"- {word}: rnn\n  cell: {name}\n  from: c"), {"custom_cells": True} if cell.module else {}
    try:
        tree = convert.load_pytree(rules, file, settings=said)
    except convert.PlanError as error:
        assert {found.code for found in error.findings} <= {"value-not-reversible", "tied-weights-differ"}
        assert "MGU" in name or any("adds bias_ih to bias_hh" in found.fix for found in error.findings) or "haiku.LSTM" in name or "residual" in name  # fmt: skip
        return
    assert all({part for held in cell.leaves.values() for part in held.parts if letter in held.gates} == set("WUbc") for letter in cell.gates.values())  # fmt: skip
    again = tmp_path / "again.safetensors"
    convert.convert(rules, MemorySource(flat(tree)), again, settings=said)
    assert all(load_file(again)[tensor].tobytes() == x.tobytes() for tensor, x in load_file(file).items())


def flat(tree: Any, prefix: str = "") -> dict[str, np.ndarray]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {name: x for key, value in tree.items() for name, x in flat(value, f"{prefix}/{key}".lstrip("/")).items()}


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    rules = rule_file("- gru: rnn\n  cell: flax.linen.GRUCell\n  from: c")
    tree = tree_of(cell_of("flax.linen.GRUCell")[1], "c", np.random.default_rng(0))
    file = tmp_path / "in.safetensors"
    convert.convert(rules, MemorySource(tree), file)
    for name, shape in {"rnn.weight_hh_l0": (15, 4), "rnn.bias_hh_l0": (12,), "rnn.weight_ih_l0": (15,)}.items():
        save_file(load_file(file) | {name: np.zeros(shape, "f4")}, tmp_path / "wrong.safetensors")
        with pytest.raises(convert.PlanError) as error:
            convert.plan_reverse(rules, tmp_path / "wrong.safetensors")
        assert {found.code for found in error.value.findings} <= {"tensor-spec-differs", "tree-not-derived", "shape-mismatch"}, name  # fmt: skip
        assert any(name in str(found) or "state width" in str(found) for found in error.value.findings), str(
            error.value
        )
