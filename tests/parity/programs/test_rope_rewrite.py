"""RoPE of the target is measured: what differs from the JAX model's has its name, and nothing else has."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from convert.numerics.compare import difference
from convert.programs.program import Program
from convert.programs.record_jax import record_jax
from convert.programs.record_torch import record_torch
from convert.programs.rewrites.positions.rope import rope
from convert.programs.rewrites.rewrite import Goal, Rewrite
from convert.verify.diagnosis.other_operation import compared
from support import decoder

Edit = Callable[[Any], None]
ENOUGH = 1e-9


@cache
def source() -> Program:
    return record_jax(decoder.apply, decoder.source().arrays, decoder.reference(None).inputs(0))


def rewrites(edit: Edit) -> list[Rewrite]:
    module = decoder.load({name: x.double() for name, x in decoder.state().items()})
    edit(module)
    reference = decoder.reference(None)
    target, want = record_torch(module, reference.run, reference.inputs(0)), source().outputs["y"].array
    goal = Goal("y", lambda got: difference(got, want).relative, ENOUGH)
    return [one for one, _ in rope(source(), target, goal)]


def tables(base: float = decoder.BASE, scale: float = 1.0, first: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    steps = (torch.arange(decoder.STEPS, dtype=torch.float64) + first) * scale
    angles = steps[:, None] / base ** (torch.arange(0, decoder.HEAD, 2) / decoder.HEAD)
    return angles.sin()[:, None], angles.cos()[:, None]


def turned(signs: tuple[int, int] = (-1, 1), width: int = decoder.HEAD, size: float = 1, **angles: float) -> Edit:
    """Halves of the first features are turned."""
    sin, cos = tables(**angles)

    def turn(_: Any, x: torch.Tensor) -> torch.Tensor:
        one, two = x[..., :width].chunk(2, -1)
        s, c = sin[..., : width // 2] * size, cos[..., : width // 2] * size
        return torch.cat((one * c + signs[0] * two * s, two * c + signs[1] * one * s, x[..., width:]), -1)

    return decoder.layers(turned=turn)


def neighbours(_: Any, x: torch.Tensor, **angles: float) -> torch.Tensor:
    sin, cos = tables(**angles)
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)


def stored_for_neighbours(module: Any) -> None:
    """Neighbours are turned, as the weights want it, and by another base."""
    order = torch.tensor([0, 2, 1, 3])
    for layer in module.layers:
        for part in (layer.q, layer.k):
            part.weight.data = part.weight.unflatten(0, (-1, decoder.HEAD))[:, order].flatten(0, 1)
    decoder.layers(turned=lambda layer, x: neighbours(layer, x, base=100.0))(module)


def one_layer(module: Any) -> None:
    module.layers[1].base = 100.0


FAULTS: dict[str, tuple[Edit, str, tuple[str, ...]]] = {
    "base": (turned(base=500.0), "RoPE of another base", ("base 500 in the target, and 10000 in the JAX model",)),
    "base of one layer": (one_layer, "RoPE of another base", ("in layers.1 (decoder.py:", "base 100 in the target")),
    "positions divided": (turned(scale=0.25), "RoPE of other frequencies", ("are 0.25 times those of the JAX model",)),
    "positions from one": (turned(first=1.0, base=100.0), "RoPE of another base", ()),
    "other direction": (turned(signs=(1, -1)), "angles of the other sign", ("the other sign",)),
    "no minus": (turned(signs=(1, 1)), "RoPE that is no rotation", ("a sign or a factor differs within the pair",)),
    "half of the features": (turned(width=2), "RoPE of another width", ("turns 2 features", "the JAX model 4")),
    "longer": (turned(size=1.1), "RoPE of another size", ("by 1.1, too, and the JAX model by 1",)),
    "neighbours": (decoder.layers(turned=neighbours), "RoPE of other pairs", ("(0, 1), (2, 3)", "(0, 2), (1, 3)")),
    "base, with weights for neighbours": (stored_for_neighbours, "RoPE of another base", ("base 100 in the target",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_is_named_and_restores_the_output(fault: str) -> None:
    edit, name, says = FAULTS[fault]
    found = [one for one in rewrites(edit) if one.error <= ENOUGH]
    assert found and found[0].name == name
    for words in ("decoder.py:" if "layer" in fault else "test_rope_rewrite.py:", *says):
        assert words in found[0].problem
    assert found[0].fix


def test_the_same_rotation_is_not_accused() -> None:
    """Neither where all is right, nor where something else is wrong."""
    assert rewrites(lambda module: None) == rewrites(decoder.layers(window=4)) == []


def test_where_more_differs_rope_alone_restores_nothing() -> None:
    def two(module: Any) -> None:
        decoder.layers(window=4, base=100.0)(module)

    found = rewrites(two)
    assert [one.name for one in found] == ["RoPE of another base"] and found[0].error > 0.01
    assert np.isfinite(found[0].error)


@pytest.mark.slow
def test_what_differs_behind_it_is_named_too() -> None:
    module = decoder.load(decoder.state())
    decoder.layers(window=4)(module)
    turned(signs=(1, 1))(module)
    reference = decoder.reference(None)
    target, want = record_torch(module, reference.run, reference.inputs(0)), source().outputs["y"].array
    before = difference(target.outputs["y"].array, want).relative
    site: Any = SimpleNamespace(
        evidence=SimpleNamespace(masks={}), module=module, boundary="y", before=before, enough=ENOUGH
    )
    found = compared(site, reference, source(), target, "y").explanation
    assert found is not None and found.name == "RoPE that is no rotation and another mask"
    assert found.error <= ENOUGH and "in the target a position sees itself and up to 3" in found.problem
