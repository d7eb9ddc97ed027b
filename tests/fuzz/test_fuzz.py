"""A few seconds of `python -m fuzz`, and that the harness sees what it is there for."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import child, harness
from support.marks import slow_but


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["orbax", "rules"], harness.KINDS))
def test_damaged_checkpoints_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    done = harness.fuzz(kind, tmp_path / kind, 60, seed=7, cases=25)
    assert not done.failures, f"repeat with `python -m fuzz`, seed 7: {done.failures}"
    assert done.cases == 25 and done.refused


def test_a_case_is_the_same_each_time(tmp_path: Path) -> None:
    import random

    made = harness.KINDS["npz"](tmp_path).read_bytes()
    results = {harness.mutate(made, random.Random("npz 7 3"), made) for _ in range(3)}
    assert len(results) == 1 and results != {made}


PLANTS = {
    "crash": ("import os; os._exit(9)", "the process ended with 9"),
    "memory": ("b = bytearray(8 << 30)", "MemoryError"),
    "other error": ("1 / 0", "ZeroDivisionError"),
    "outside": ("open('/etc/hostname').read()", "AssertionError: open '/etc/hostname'"),
    "written": ("open(path.parent / 'new', 'w')", "AssertionError: open"),
    "unpickled": ("import pickle; pickle.loads(b'cos\\nsystem\\n.')", "AssertionError: pickle.find_class"),
    "process": ("import subprocess; subprocess.run(['true'])", "AssertionError: subprocess.Popen"),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_the_harness_sees_a_planted_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str) -> None:
    """A child whose npz reader does what a reader must not do."""
    code, said = PLANTS[plant]
    planted = tmp_path / "fuzz"
    planted.mkdir()
    text = (
        Path(child.__file__)
        .read_text()
        .replace("def main(", f"def _planted(path, options):\n    {code}\n\n\ndef main(", 1)
    )
    text = text.replace(
        "    list(known_formats())\n",
        "    list(known_formats())\n    from convert.checkpoints.formats import npz\n"
        "    object.__setattr__(npz.FORMAT, 'open', _planted)\n    object.__setattr__(npz.FORMAT, 'find', lambda p: [p])\n",
    )
    (planted / "child.py").write_text(text)
    monkeypatch.setattr(harness, "HERE", planted)
    done = harness.fuzz("npz", tmp_path / "work", 60, seed=0, cases=1)
    assert done.failures and said in done.failures[0][1], done.failures
