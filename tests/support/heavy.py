"""Packages and calls that a unit test does not use; `tests/unit/conftest.py` and `tests/unit/test_imports.py` enforce it."""

from __future__ import annotations

import sys

HEAVY = frozenset(
    (
        *("jax", "jaxlib", "flax", "haiku", "equinox", "diffrax", "orbax", "keras", "optax", "chex"),
        *("torch", "torchcde", "torchdiffeq", "transformers", "timesfm", "recurrentgemma"),
    )
)


def is_heavy(module: str) -> bool:
    """Whether the module belongs to a package that takes seconds to import."""
    return module.partition(".")[0] in HEAVY


def loaded() -> list[str]:
    """Heavy packages that this process has imported."""
    return sorted(HEAVY & sys.modules.keys())
