"""The line that a finding names is the model's, not that of a library which the model calls."""

from pathlib import Path

import pytest

from convert.programs import where

PACKAGES = Path(where.__file__).parents[3] / "site-packages"  # of no environment: files are not opened


@pytest.mark.parametrize("library", sorted(where.LIBRARIES))
def test_a_library_is_not_the_model(library: str) -> None:
    frames = [
        (str(PACKAGES / library / "solve.py"), 1151),
        (str(PACKAGES / "timesfm" / "layers.py"), 40),
        ("run.py", 3),
    ]
    assert where.model_line(frames) == "layers.py:40"
    assert where.model_line(frames[:1]) == ""


def test_the_users_file_that_calls_diffrax() -> None:
    frames = [
        (str(PACKAGES / "diffrax" / "_integrate.py"), 400),
        (str(PACKAGES / "lineax" / "_solve.py"), 2),
        ("model.py", 7),
    ]
    assert where.model_line(frames) == "model.py:7"
