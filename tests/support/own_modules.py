"""Modules that a user has written, in the folder where the command runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def work_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, str], others: tuple[str, ...] = ()
) -> Path:
    """Work in a folder with these modules, by name; none of them, and of `others`, is imported yet."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    for name in (*modules, *others):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder
