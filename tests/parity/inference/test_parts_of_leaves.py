"""Recurrent cells in the code of both programs, which put gates, and the weights of input and state, into other matrices."""

from __future__ import annotations

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules

B, T, D, H = 3, 5, 4, 6
GATES = "zrn"


class Cell(nn.Module):
    """A GRU with the reset gate in front of the matrix; ``joined``: a layer for each gate has input and state side by side."""

    def __init__(self, joined: bool = True, swapped: bool = False, behind: bool = False) -> None:
        super().__init__()
        sides = {"both": D + H} if joined else {"x": D, "h": H}
        self.layers = nn.ModuleDict({g + s: nn.Linear(n, H, bias=s != "h") for g in GATES for s, n in sides.items()})
        self.joined, self.swapped, self.behind = joined, swapped, behind

    def gate(self, name: str, x: Any, h: Any) -> Any:
        if self.joined:
            return self.layers[f"{name}both"](torch.cat([x, h], -1))
        return self.layers[f"{name}x"](x) + self.layers[f"{name}h"](h)

    def forward(self, given: Any) -> Any:
        h, found = torch.zeros(len(given), H).to(given), []
        for x in given.unbind(1):
            z, r = (self.gate(name, x, h).sigmoid() for name in "zr")
            n = self.layers["nx"](x) + r * self.layers["nh"](h) if self.behind else self.gate("n", x, r * h)
            h = z * h + (1 - z) * n.tanh() if self.swapped else (1 - z) * h + z * n.tanh()
            found.append(h)
        return torch.stack(found, 1)


class Fused(nn.Module):
    """All gates of the input in one layer, z and r of the state in another."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.h, self.n = nn.Linear(D, 3 * H), nn.Linear(H, 2 * H, bias=False), nn.Linear(H, H, bias=False)

    def forward(self, given: Any) -> Any:
        h, found = torch.zeros(len(given), H).to(given), []
        for x in given.unbind(1):
            a, b, c = self.x(x).chunk(3, -1)
            d, e = self.h(h).chunk(2, -1)
            z, r = (a + d).sigmoid(), (b + e).sigmoid()
            h = (1 - z) * h + z * torch.tanh(c + self.n(r * h))
            found.append(h)
        return torch.stack(found, 1)


def fused(w: Any, given: Any) -> Any:
    """z and r in one matrix, with rows for the input and for the state; n in another."""

    def step(h: Any, x: Any) -> Any:
        z, r = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, h], -1) @ w["zr"] + w["b"][: 2 * H]), 2, -1)
        n = jnp.tanh(jnp.concatenate([x, r * h], -1) @ w["n"] + w["b"][2 * H :])
        h = (1 - z) * h + z * n
        return h, h

    return jax.lax.scan(step, jnp.zeros((B, H)), given.swapaxes(0, 1))[1].swapaxes(0, 1)


def listed(w: Any, given: Any) -> Any:
    """The gates are the elements of an axis."""
    return fused(
        {
            "zr": jnp.concatenate([w["w"][0], w["w"][1]], -1),
            "n": w["w"][2],
            "b": w["b"].reshape(-1),
        },
        given,
    )


def haiku_gru(w: Any, given: Any) -> Any:
    def run(x: Any) -> Any:
        core = hk.GRU(H, name="gru")
        return hk.dynamic_unroll(core, x, core.initial_state(B), time_major=False)[0]

    return hk.without_apply_rng(hk.transform(run)).apply({"gru": dict(w)}, given)


FUSED = {"zr": (D + H, 2 * H), "n": (D + H, H), "b": (3 * H,)}
LISTED = {"w": (3, D + H, H), "b": (3, H)}
OF_HAIKU = {"w_i": (D, 3 * H), "w_h": (H, 3 * H), "b": (3 * H,)}
PAIRS = [
    ("a layer for each side", fused, FUSED, lambda: Cell(joined=False)),
    ("other matrices", fused, FUSED, Fused),
    ("elements of an axis", listed, LISTED, lambda: Cell(joined=False)),
    ("Haiku", haiku_gru, OF_HAIKU, Cell),
]


@pytest.mark.parametrize(("function", "shapes", "make"), [case[1:] for case in PAIRS], ids=[case[0] for case in PAIRS])
def test_parts_of_leaves_make_parts_of_tensors(function: Any, shapes: dict[str, tuple[int, ...]], make: Any) -> None:
    module = make()
    found = derive(function, module, shapes, floats(B, T, D))
    assert grades(found) == {Grade.DERIVED}
    assert any("\n  part: " in rule for rule in rules(found, module))


def test_the_rules_are_those_that_a_person_writes() -> None:
    module = Fused()
    leaves = {**dict.fromkeys(GATES, (D + H, H)), "b": (3 * H,)}
    found = derive(lambda w, x: fused({**w, "zr": jnp.concatenate([w["z"], w["r"]], -1)}, x), module, leaves, floats(B, T, D))  # fmt: skip
    weights = [rule for rule in rules(found, module) if "einsum" in rule]
    assert [rule.replace("\n  ", ", ") for rule in weights] == [
        '- einsum: "...(D + C),(D + C)E->...E", from: "{z,r,n}", part: 1 of 2, linear: x',
        '- einsum: "...(D + C),(D + C)E->...E", from: "{z,r}", part: 2 of 2, linear: h',
        '- einsum: "...(D + C),(D + C)E->...E", from: n, part: 2 of 2, linear: n',
    ]


@pytest.mark.slow
def test_another_cell_ends_as_a_difference() -> None:
    found = derive(fused, Cell(behind=True, joined=False), FUSED, floats(B, T, D))
    assert not found.complete
    assert found.differences


@pytest.mark.slow
def test_a_gate_that_multiplies_the_other_state_is_the_negated_one() -> None:
    """``1 - sigmoid(a)`` is ``sigmoid(-a)``."""
    found = derive(fused, Cell(swapped=True, joined=False), FUSED, floats(B, T, D))
    assert grades(found) == {Grade.DERIVED}
    negated = {tensor.name for tensor in found.tensors if any(part.factor == -1 for part in tensor.parts)}
    assert negated == {"layers.zx.weight", "layers.zx.bias", "layers.zh.weight"}
