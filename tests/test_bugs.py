"""The five bugs of examples/bugs: each README's commands are run, and print what it says. And docs/cde.md's, in examples/cde."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from convert.check import backend_runs, backends
from convert.cli.app import app

ROOT = Path(__file__).parents[1]
BUGS = ROOT / "examples" / "bugs"
FOLDERS = sorted(path.name for path in BUGS.iterdir() if path.is_dir())
OWN_MODULES = ("model_jax", "model_torch", "models", "reference")


def pairs(text: str) -> list[tuple[list[str], list[str]]]:
    """Each block of commands, and the lines that it is said to print."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert [word for word, _ in found] == ["sh", ""] * (len(found) // 2)
    return [(found[k][1].splitlines(), found[k + 1][1].splitlines()) for k in range(0, len(found), 2)]


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the bug's folder, at the same place below a root that has the tests' checkpoints."""
    here = tmp_path / "examples" / "bugs" / request.param
    shutil.copytree(BUGS / request.param, here)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "golden").symlink_to(ROOT / "tests" / "golden")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    # torch.compile takes longer than all the rest, and tests/check/test_backends.py has it.
    every = backends.torch_runs
    monkeypatch.setattr(
        backends, "torch_runs", lambda *args: (run for run in every(*args) if run.name != backend_runs.COMPILED)
    )
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    yield here
    for name in OWN_MODULES:
        sys.modules.pop(name, None)


def ran(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """What a command prints, and its exit code; in this process, so that JAX and torch are imported once."""
    program, *arguments = shlex.split(command)
    if program == "convert":
        done = CliRunner().invoke(app, arguments)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.output, done.exit_code
    assert program == "python"
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_path(arguments[0], run_name="__main__")
    return "", 0


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_the_readme_says_what_is_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line, in this order; the wrong version fails and the right one passes."""
    said = (folder / "README.md").read_text()
    outcomes = []
    for commands, expected in pairs(said):
        output, code = "", 0
        for command in commands:
            output, code = ran(command, monkeypatch)
            assert code == 0 or command == commands[-1], (command, output)
        at = 0
        for line in expected:
            found = output.find(line, at)
            assert found >= 0, f"{line!r} is not in what {commands[-1]!r} prints behind the lines before it:\n{output}"
            at = found + len(line)
        assert f"exit code {code})" in expected[-1]
        outcomes.append(code)
    assert outcomes == [1] * (len(outcomes) - 1) + [0] and len(outcomes) >= 2


def test_the_index_lists_every_bug() -> None:
    listed = re.findall(r"^\| \[`([\w-]+)/`\]\(([\w-]+)\)", (BUGS / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in listed) == FOLDERS and all(a == b for a, b in listed) and len(listed) == 5
    for name in FOLDERS:
        text = (BUGS / name / "README.md").read_text()
        assert "## The wrong version" in text and "## The right version" in text


def test_the_commands_of_the_page_of_cdes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neural CDE and stored paths, both equal."""
    shutil.copytree(ROOT / "examples" / "cde", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    block = re.search(r"```sh\ncd examples/cde\n(.*?)```", (ROOT / "docs" / "cde.md").read_text(), re.DOTALL)
    assert block is not None
    printed = ""
    for line in block[1].splitlines():
        command, _, file = line.partition(" > ")
        output, code = ran(command, monkeypatch)
        assert code == 0, (line, output)
        printed += output
        if file:
            Path(file).write_text(output)
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    assert printed.count("(exit code 0)") == 2 and "model     passed" in printed
    assert set(load_file("paths.safetensors")) == {"cubic", "times", "linear", "linear_times"}
