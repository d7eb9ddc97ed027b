"""The command line, for the tests of this folder."""

from __future__ import annotations

import pytest

from support.command_line import Run


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)
