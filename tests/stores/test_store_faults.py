"""Random faults of a store: identical bytes or one clear error; `python -m support.store_faults` makes more of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import store_faults
from support.store_faults import run_faults

pytestmark = pytest.mark.slow


def test_random_faults_of_a_store(tmp_path: Path) -> None:
    done = run_faults(tmp_path, runs=12, seed=1)
    assert done.met > 6 and len(done.ends) > 1 and len(done.kinds) > 4


@pytest.mark.parametrize(
    ("broken", "meets"),
    [
        ("convert.stores.upload.Uploads.abort", "parts"),
        ("convert.stores.upload.Uploads.complete", "reads"),
    ],
)
def test_a_fault_of_the_program_is_found(
    broken: str, meets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads that are not aborted, and an output that is called written and is not."""
    monkeypatch.setattr(broken, lambda self, *_: [])
    monkeypatch.setattr(store_faults, "KINDS", {"refused credentials": (403, "AccessDenied", None, meets)})
    with pytest.raises(AssertionError, match="other bytes|stay"):
        run_faults(tmp_path, runs=30)
