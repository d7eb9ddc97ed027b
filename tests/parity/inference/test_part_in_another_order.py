"""A leaf of which one layer has the first rows and another one the rest in another order, as the layers of a graph network for a node and for its neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.rule_file.joining import joined
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, grades, rules

N, D, F, TOWERS = 5, 4, 3, 2
SCALES = (1, 3)
SHAPES = {"w": (TOWERS, D + 4 * F, F), "x": (D, F)}


def _forward(w: Mapping[str, Any], x: Any) -> Any:
    """Of each scale: both functions."""
    own = x @ w["x"]
    parts = [function(own * scale) for scale in SCALES for function in (jnp.tanh, jnp.sin)]
    given = jnp.concatenate([x, *parts], -1)
    return jnp.einsum("nd,tdf->tnf", given, w["w"])


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(D, F, bias=False), nn.Linear(4 * F, F, bias=False)

    def forward(self, x: Any, parts: Any) -> Any:
        return self.own(x) + self.others(parts)


class Net(nn.Module):
    """Of each function: both scales. `swapped`: those of the last one stand in the other order."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.swapped = swapped
        self.x = nn.Linear(D, F, bias=False)
        self.towers = nn.ModuleList(Tower() for _ in range(TOWERS))

    def forward(self, x: Any) -> Any:
        own = self.x(x)
        last = SCALES[::-1] if self.swapped else SCALES
        parts = [function(own * scale) for function, of in ((torch.tanh, SCALES), (torch.sin, last)) for scale in of]
        return torch.stack([tower(x, torch.cat(parts, -1)) for tower in self.towers])


CASES = {
    "in turns": (
        False,
        '- einsum: "...(D + E F C),(D + E F C)G->...G", from: w, stacked: {i: 0}, part: 1 of 2, linear: towers.{i}.own',
        '- einsum: "...(D + E F C),(D + E F C)G->...G", from: w, stacked: {i: 0}, part: 2 of 2, '
        'linear: {module: "towers.{i}.others", axes: "G(F E C)"}',
    ),
    "in no turns": (
        True,
        '- einsum: "...(D + E),(D + E)C->...C", from: w, stacked: {i: 0}, part: 1 of 2, linear: towers.{i}.own',
        '- einsum: "...(D + E),(D + E)C->...C", from: w, stacked: {i: 0}, concatenated: {E: F + G + K}, part: 2 of 2, '
        'linear: {module: "towers.{i}.others", concatenated: {E: F + K + G}}',
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_rest_has_the_order_of_its_target(case: str) -> None:
    swapped, *wanted = CASES[case]
    module = Net(swapped)
    found = derive(_forward, module, SHAPES, floats(N, D))
    assert grades(found) == {Grade.DERIVED}
    assert [rule.replace("\n  ", ", ") for rule in rules(found, module)][1:] == wanted

    tensor = found.tensor("towers.1.others.weight")
    (part,) = tensor.parts
    exchanged = replace(part, positions=np.concatenate([part.positions[1::-1], part.positions[2:]]))
    other = replace(tensor, parts=(exchanged,))
    wrong = replace(found, tensors=tuple(other if t is tensor else t for t in found.tensors))
    assert any("others" in name for name in write_rules(wrong, model_of_module(module, "Model")).open)
    right = write_rules(found, model_of_module(module, "Model")).text
    assert [one.tensor for one in compare_rules(right, wrong)] == [tensor.name]


def test_a_part_in_another_order_is_not_joined_with_one_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Net(True)
    found = derive(_forward, module, SHAPES, floats(N, D))
    part = joined._part

    def without_order(source: Any) -> Any:
        axes = tuple(replace(axis, parts=()) for axis in source.layout.axes)
        return part(replace(source, layout=replace(source.layout, axes=axes)))

    monkeypatch.setattr(joined, "_part", without_order)
    written = write_rules(found, model_of_module(module, "Model"))
    assert "linear: towers.{i}.{own,others}" in written.text
    wrong = compare_rules(written.text, found)
    assert {one.tensor for one in wrong} == {f"towers.{k}.others.weight" for k in range(TOWERS)}
