"""Pages that show commands and what they print: the commands are run, in this process, and print it."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from convert.cli.app import app
from convert.core.errors import ConvertError

OWN_MODULES = ("model_jax", "model_torch", "models", "reference", "flax_model", "equinox_model", "keras_model")


def pairs(text: str) -> list[tuple[list[str], list[str]]]:
    """Each block of commands, and the lines that it is said to print."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [word for word, _ in found] == ["sh", ""] * (len(found) // 2)
    return [(found[k][1].splitlines(), found[k + 1][1].splitlines()) for k in range(0, len(found), 2)]


@contextmanager
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In this folder, with its modules and nobody else's of these names."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    yield
    for name in OWN_MODULES:
        sys.modules.pop(name, None)


def ran(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """What a command prints, and its exit code; in this process, so that JAX and torch are imported once."""
    command, _, file = command.partition(" > ")
    program, *arguments = shlex.split(command)
    if program == "convert":
        done = CliRunner().invoke(app, arguments)
        if isinstance(done.exception, ConvertError):  # as `main` does
            return f"error: {done.exception}", 2
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        if file:
            Path(file).write_text(done.stdout)
        return done.output, done.exit_code
    assert program == "python"
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(arguments[0], run_name="__main__")
    return "", 0


def play(text: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs a page: what is said is printed, line by line, in this order. The last line of a block says the exit code.

    Returns:
        The exit code of the last command of each block.
    """
    outcomes = []
    for commands, expected in pairs(text):
        printed, code = "", 0
        for command in commands:
            output, code = ran(command, monkeypatch)
            assert code == 0 or command == commands[-1], (command, output)
            printed += output
        *lines, last = expected
        said, _, exit_code = last.rpartition("(exit code ")
        at = 0
        for line in (*lines, said):
            found = printed.find(line, at)
            assert found >= 0, f"{line!r} is not in what {commands[-1]!r} prints behind the lines before it:\n{printed}"
            at = found + len(line)
        assert exit_code == f"{code})", (commands[-1], printed)
        outcomes.append(code)
    return outcomes
