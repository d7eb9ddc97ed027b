"""What both models do at a place, in one sentence: it never says the same of both as if that were the difference."""

from __future__ import annotations

import pytest

from convert.programs.divergence.naming.brief import compared


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("sorts", "sorts", "the target sorts, and so does the JAX model, with other results"),
        (
            "convolves with c.weight",
            "convolves with c/kernel",
            "the target convolves with c.weight, and the JAX model with c/kernel, with other results",
        ),
        ("adds 1", "adds 2", "the target adds 1, the JAX model adds 2"),
        ("sorts, adds 1", "adds 2", "the target sorts, adds 1; the JAX model adds 2"),
        (
            "adds a table of shape [6, 8]",
            "adds b",
            "the target adds a table of shape [6, 8], the JAX model adds b",
        ),
    ],
)
def test_two_models_compared(ours: str, theirs: str, said: str) -> None:
    assert compared(ours, theirs) == said
