"""Drafts for tests: trees of random numbers, and the questions of a draft answered in its text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from memory_source import MemorySource


def tree(**specs: tuple[int, ...]) -> MemorySource:
    """A tree of random numbers; ``__`` is a slash."""
    rng = np.random.default_rng(0)
    shapes = {name.replace("__", "/"): shape for name, shape in specs.items()}
    return MemorySource({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def answered(text: str, answers: Mapping[str, Mapping[str, Any]], more: str = "") -> str:
    """A draft with its questions answered: by the leaf's path, key -> a value, the number of an alternative, or None.

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
            asked = re.match(r"(- |  )(\w+): (?:(&\w+ )?ask |\{.*scale: ask\})", line)
            if asked is None:
                continue
            value = known[asked[2]]
            choices = []
            for below in lines[k + 1 :]:
                if not below.startswith("  # "):
                    break
                choices.append(below.removeprefix("  # ").split("    #")[0])
            said = choices[value] if isinstance(value, int) else f"{asked[2]}: {asked[3] or ''}{value}"
            lines[k] = asked[1] + said if value is not None else ""
        blocks[n] = "\n".join([*lines, *(f"  {line}" for line in known.get("+", ()))])
    joined = "\n\n".join(blocks).replace("\naxes:", f"\naxes:\n{more}  #", 1)
    return "\n".join(line for line in joined.splitlines() if not line.lstrip().startswith("#"))
