"""Drafts for tests: trees of random numbers, and the questions of a draft answered in its text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from support.memory_source import MemorySource


def tree(**specs: tuple[int, ...]) -> MemorySource:
    """A tree of random numbers; ``__`` is a slash."""
    rng = np.random.default_rng(0)
    shapes = {name.replace("__", "/"): shape for name, shape in specs.items()}
    return MemorySource({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


_NEXT = re.compile(r"with the (?:(\d) )?lines? below")


def alternatives(below: Sequence[str]) -> list[tuple[list[str], str]]:
    """What a question offers in the lines below it: those of each alternative, and all that is said of it, the lines too."""
    found: list[tuple[list[str], str]] = []
    wanted = 0
    for line in below:
        if not line.startswith("  # "):
            break
        bare, _, remark = line.removeprefix("  # ").partition("    #")
        if wanted:
            found[-1] = ([*found[-1][0], bare], f"{found[-1][1]}\n{bare}")
            wanted -= 1
            continue
        found.append(([bare], f"{bare}\n{remark.strip()}" if remark else bare))
        more = _NEXT.search(remark)
        wanted = int(more[1] or 1) if more else 0
    return found


def answered(text: str, answers: Mapping[str, Mapping[str, Any]], more: str = "") -> str:
    """A draft with its questions answered: by the leaf's path, key -> a value, the number of an alternative (with another name for the target: a pair), or None.

    `*` answers what no path does, and `+` adds lines. Alternatives are taken from the comments of the draft; all comments go.
    What several rules ask alike is answered where it is asked.
    """
    blocks = text.split("\n\n")
    for n, block in enumerate(blocks):
        path = re.search(r"^(?:- |  )from: (\S+)", block, re.MULTILINE)
        if path is None:
            continue
        known = {**answers.get("*", {}), **answers.get(path[1], {})}
        lines = block.splitlines()
        for k, line in enumerate(lines):
            asked = re.match(r"(- |  )(\w+): (?:(&\w+ )?ask |\{.*scale: ask\}|\S+\(\w+=ask\))", line)
            if asked is None:
                continue
            value = known[asked[2]]
            said = [f"{asked[2]}: {asked[3] or ''}{value}"]
            if isinstance(value, (int, tuple)):
                number, name = value if isinstance(value, tuple) else (value, None)
                said = list(alternatives(lines[k + 1 :])[number][0])
                said[0] = f"{said[0].partition(':')[0]}: {name}" if name else said[0]
            lines[k] = "\n".join([asked[1] + said[0], *(f"  {more}" for more in said[1:])]) if value is not None else ""
        blocks[n] = "\n".join([*lines, *(f"  {line}" for line in known.get("+", ()))])
    joined = "\n\n".join(blocks).replace("\naxes:", f"\naxes:\n{more}  #", 1)
    return "\n".join(line for line in joined.splitlines() if not line.lstrip().startswith("#"))
