"""The command line, run within the process of the tests."""

from __future__ import annotations

import sys

import pytest

from convert.cli import main


class Run:
    """One run of the command line within this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *args: object, code: int = 0) -> tuple[str, str]:
        """Runs `convert ARGS`, checks the exit code, gives stdout and stderr."""
        self.monkeypatch.setattr(sys, "argv", ["convert", *map(str, args)])
        self.monkeypatch.setattr(
            sys.modules["__main__"], "__package__", ""
        )  # click names it in the usage: `python -m pytest`
        with pytest.raises(SystemExit) as stop:
            main()
        captured = self.capsys.readouterr()
        assert (stop.value.code or 0) == code, captured.err
        return captured.out, captured.err
