"""Fixtures of all tests."""

from __future__ import annotations

import pytest

from command_line import Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)
