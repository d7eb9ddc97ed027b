"""Garbage collection put off while there is no garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """For what makes many small objects, all of which stay, as reading rules, opening a checkpoint and planning do: to look
    for garbage among them again and again takes a third of the time. Afterwards they count as old, and are looked at with the other old ones."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was and not gc.get_freeze_count():  # else what someone has frozen would thaw
            gc.freeze()
            gc.unfreeze()
        if was:
            gc.enable()
