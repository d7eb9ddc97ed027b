"""The bugs of examples/bugs: each README's commands are run, and print what it says. And docs/guides/neural-cdes.md's, in examples/cde."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from convert.verify.model import backend_runs, backends
from support.pages import inside, play, ran
from support.paths import DOCS, EXAMPLES, GOLDEN

pytestmark = pytest.mark.slow  # takes long, as each test starts programs or models of its own

BUGS = EXAMPLES / "bugs"
FOLDERS = sorted(path.name for path in BUGS.iterdir() if path.is_dir())


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the bug's folder, at the same place below a root that has the tests' checkpoints."""
    here = tmp_path / "examples" / "bugs" / request.param
    shutil.copytree(BUGS / request.param, here)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "golden").symlink_to(GOLDEN)
    # torch.compile takes longer than all the rest, and tests/models/verify/test_backends.py has it.
    every = backends.torch_runs
    monkeypatch.setattr(
        backends, "torch_runs", lambda *args: (run for run in every(*args) if run.name != backend_runs.COMPILED)
    )
    with inside(here, monkeypatch):
        yield here


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_the_readme_says_what_is_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line by line, in this order; the wrong version fails and the right one passes."""
    outcomes = play((folder / "README.md").read_text(), monkeypatch)
    assert outcomes == [1] * (len(outcomes) - 1) + [0] and len(outcomes) >= 2


def test_the_index_lists_every_bug() -> None:
    listed = re.findall(r"^\| \[`([\w-]+)/`\]\(([\w-]+)\)", (BUGS / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _ in listed) == FOLDERS and all(a == b for a, b in listed)
    for name in FOLDERS:
        text = (BUGS / name / "README.md").read_text()
        assert "## The wrong version" in text and "## The right version" in text


def test_the_commands_of_the_page_of_cdes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neural CDE and stored paths, both equal."""
    shutil.copytree(EXAMPLES / "cde", tmp_path, dirs_exist_ok=True)
    block = re.search(r"```sh\ncd examples/cde\n(.*?)```", (DOCS / "guides" / "neural-cdes.md").read_text(), re.DOTALL)
    assert block is not None
    printed = ""
    with inside(tmp_path, monkeypatch):
        for line in block[1].splitlines():
            output, code = ran(line, monkeypatch)
            assert code == 0, (line, output)
            printed += output
    assert printed.count("(exit code 0)") == 2 and "model     passed" in printed
    assert set(load_file("paths.safetensors")) == {"cubic", "times", "linear", "linear_times"}
