"""What both models compute is said with the submodule where they do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from convert.references.protocol import INPUT, Variant
from convert.verify.diagnosis.compare import compare_variants, replaced

X = np.linspace(-1, 1, 5)


@dataclass
class Place:
    """The part of a `Site` that the comparison reads: the JAX model squares, the target cubes."""

    boundary: str
    want: Any = field(default_factory=lambda: X**2)
    got: Any = field(default_factory=lambda: X**3)
    seen: Any = None
    enough: float = 1e-9

    @property
    def name(self) -> str:
        return self.boundary.removesuffix(INPUT)

    def error(self, value: Any, against: Any = None) -> float:
        return float(np.abs(value - (self.want if against is None else against)).max())


@pytest.mark.parametrize(
    ("boundary", "where"), [("layers.0.mlp", "in layers.0.mlp"), (f"head{INPUT}", "in front of head")]
)
def test_the_sentence_names_the_submodule(boundary: str, where: str) -> None:
    variants = [Variant("square", lambda seen: X**2), Variant("cube", lambda seen: X**3)]
    place: Any = Place(boundary)
    found = compare_variants(place, variants, "", replaced).explanation
    assert found is not None and found.name == "cube for square"
    assert found.problem == f"{where}, the target has cube, and the JAX model square"
    one: Any = Place(boundary, got=X)
    found = compare_variants(one, variants, "", replaced).explanation
    assert found is not None and "the target has none of the 2 functions that were tried" in found.problem
