"""Pages with ``console`` blocks: each command is run in a shell, and prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
MEASURED = re.compile(r"[0-9.]+e[+-][0-9]+|[0-9.]+ s\b|[0-9.]+ [kM]?B/s|[0-9]+%")


def shown(lines: Sequence[str]) -> list[str]:
    """Take out what depends on the machine, and the widths of columns, which follow from it."""
    return [re.sub(r"(?<=\S)\s{2,}", "  ", MEASURED.sub("#", line)).rstrip() for line in lines]


def holds(expected: Sequence[str], printed: Sequence[str]) -> bool:
    """Compare the lines in this order; any lines may stand where ``...`` is, and no others."""
    if not expected:
        return not printed
    if expected[0] == "...":
        return any(holds(expected[1:], printed[k:]) for k in range(len(printed) + 1))
    return bool(printed) and printed[0] == expected[0] and holds(expected[1:], printed[1:])


def exit_code(expected: Sequence[str]) -> int:
    """Read off the lines of a page which exit code the command has."""
    said = next((re.search(r"\(exit code (\d+)\)$", line) for line in expected if "(exit code " in line), None)
    open_questions = any(line.startswith(("Open:", "error")) for line in expected)
    return int(said[1]) if said else 2 if open_questions else 0


def run_console(body: str, folder: Path) -> int:
    """Run the commands of one block (lines that begin with ``$``), and compare what they print. Gives their number."""
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]
    for part in parts:
        command, *expected = part.rstrip("\n").split("\n")
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=ENV, capture_output=True, text=True, check=False)
        assert done.returncode == exit_code(expected), (command, done.stdout, done.stderr)
        printed = (done.stdout or done.stderr).splitlines()
        assert holds(shown(expected), shown(printed)), (command, done.stdout, done.stderr)
    return len(parts)
