"""The garbage collector is paused while many objects are made, and looks at none of them afterwards."""

from __future__ import annotations

import gc

import pytest

from convert.core.system.process import collector_paused


@pytest.mark.slow
def test_what_is_made_meanwhile_is_old_afterwards() -> None:
    with collector_paused():
        assert not gc.isenabled()
        made: list[list[object]] = [[] for _ in range(10_000)]
    assert gc.isenabled()
    oldest = set(map(id, gc.get_objects(generation=2)))
    assert all(id(one) in oldest for one in made)


@pytest.mark.slow
def test_what_the_caller_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_paused():
            pass
        assert gc.get_freeze_count() >= frozen * 0.9  # some of it has been freed
    finally:
        gc.unfreeze()


def test_a_collector_that_the_caller_has_stopped_stays_so() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
