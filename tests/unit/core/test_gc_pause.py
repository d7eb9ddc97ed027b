"""Garbage collection is put off while rules and plans are made, and as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from convert.core.gc_pause import gc_paused


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations of the collections so far; a hundred objects are enough for one."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    before = gc.get_threshold()
    gc.set_threshold(100, 1000, 1000)
    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


def test_nothing_is_collected_within_nor_right_after(collections: list[int]) -> None:
    with gc_paused():
        collections.clear()
        with gc_paused():
            kept = [[k] for k in range(1000)]
        assert not gc.isenabled()  # the outer one is still open
        kept += [[k] for k in range(1000)]
        assert not collections
    kept.append([0])
    assert gc.isenabled() and not collections  # they count as old
    kept += [[k] for k in range(1000)]
    assert collections


def test_what_was_off_or_frozen_stays_so() -> None:
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() == frozen > 0
    gc.unfreeze()
