"""Marks of parametrized tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters; those that are not `quick` run with the slow tests, as each takes seconds."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else [pytest.mark.slow])
        for case in cases
    ]
