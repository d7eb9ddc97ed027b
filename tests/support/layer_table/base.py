"""A layer of a library beside the PyTorch module that it becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert import Source
from support.drafts import alternatives

BATCH, TIME = 2, 7


@dataclass(frozen=True)
class Case:
    """One layer.

    Attributes:
        make: the library's layer; what it takes is the library's module's own business.
        x: shape of what it is given, the batch in front; whole numbers below 5 are drawn where `whole`.
        torch: the PyTorch module that computes the same.
        answers: key of a question -> a regular expression, which one of its alternatives has, or the value after ``= ``; more than `ANSWERS`.
        whole: whether x are indices.
        last: whether the channels are last in the library and second in torch.
        run: how torch's module is called, if not with x alone.
        named: whether it is told by the name of its class alone.
        more: lines added to the rule of a question's key: what the draft offers as a comment.
    """

    make: Callable[..., Any]
    x: tuple[int, ...]
    torch: Callable[[], Any]
    answers: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    last: bool = False
    run: Callable[[Any, Any], Any] | None = None
    more: Mapping[str, str] = field(default_factory=dict)
    named: bool = False

    def given(self) -> np.ndarray:
        rng = np.random.default_rng(5)
        return rng.integers(0, 5, self.x) if self.whole else rng.normal(size=self.x).astype(np.float32)


@dataclass(frozen=True)
class Live:
    """What a case's layer saved, as our reader has it, and what it computed."""

    source: Source
    y: np.ndarray


Save = Callable[[Case, str, Path], Live]  # a case, what the layer is called, a folder to write in


def shaken(rng: np.random.Generator, value: Any) -> np.ndarray:
    """Fresh biases are zeros and scales ones: a lost one would not show. Above 0, as variances are."""
    value = np.asarray(value)
    if not np.issubdtype(value.dtype, np.floating):
        return value
    return np.asarray(value + 0.1 + 0.4 * rng.random(value.shape), value.dtype)


def drawn(rng: np.random.Generator, spec: Any) -> np.ndarray:
    """Random numbers in place of what a library would start with, which takes longer. Above 0, as variances are."""
    return np.asarray(0.1 + rng.random(spec.shape), spec.dtype)


def torch_output(case: Case, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """What torch's module computes with tensors that are called ``<any module>.<its own names>``."""
    import torch

    module = case.torch()
    own = set(module.state_dict())
    found = {}
    for name, value in tensors.items():
        mine = [key for key in own if name == key or name.endswith(f".{key}")]
        assert len(mine) <= 1 or max(mine, key=len), name
        assert mine, f"{name} is no tensor of {sorted(own)}"
        found[max(mine, key=len)] = torch.tensor(np.asarray(value))
    module.load_state_dict(found, strict=True)
    module.eval()
    x = torch.tensor(case.given())
    with torch.no_grad():
        if case.run is not None:
            return np.asarray(case.run(module, x))
        return np.asarray(module(x.movedim(-1, 1)).movedim(1, -1) if case.last else module(x))


# ---- the questions of a draft, answered by someone who knows the model

ANSWERS = {
    "multiplies_by": "starts at 1",
    "padding": "VALID",
    "linear": r"linear: [\w.]+$",
    "num_groups": "= 2",
    "flattened": "",
    "embedding": r"^embedding: [\w.]+$",
}
_ASKED = re.compile(r"(- |  )(\w+): (?:(&\w+ )?ask\b|\{.*scale: ask\}|\S+\(\w+=ask\))")


def told(text: str, answers: Mapping[str, str], more: Mapping[str, str]) -> str:
    """A draft with each question answered by the one alternative that fits what is known; without comments."""
    known = {**ANSWERS, **answers}
    out: list[str] = []
    lines = text.splitlines()
    for k, line in enumerate(lines):
        asked = _ASKED.match(line)
        if asked is None:
            out.append(line)
            continue
        choices = alternatives(lines[k + 1 :])
        wanted = known.get(asked[2])
        if wanted is not None and wanted.startswith("= "):
            out.append(f"{asked[1]}{asked[2]}: {wanted[2:]}")
            continue
        if len(choices) == 1:
            wanted = ""
        assert wanted is not None, f"it asks for {asked[2]}, and nobody knows: {line}\n{choices}"
        if asked[2] == "flattened" and not wanted:
            continue
        fitting = [found for found in choices if re.search(wanted, found[1])]
        assert len(fitting) == 1, f"{wanted!r} is {len(fitting)} of the answers to `{line.strip()}`: {choices}"
        indent = " " * len(asked[1])
        out += [(asked[1] if n == 0 else indent) + added for n, added in enumerate(fitting[0][0])]
        out += [f"  {more[asked[2]]}"] if asked[2] in more else []
    return "\n".join(line for line in out if not line.lstrip().startswith("#"))
