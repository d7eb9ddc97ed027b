"""What a recurrent layer of the target and the JAX model compute, where no weight is wrong: on which side of the matrix the
reset gate is, whether a step sees the state of the step before, which state the update gate keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.references.protocol import INPUT, Observed, Variant
from convert.verify.diagnosis.site import Site

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
WRONG_SIDE = "reset gate on the wrong side of the matmul"
STALE = "stale state across steps"
POLARITY = "update gate polarity"
OUTSIDE = "b_hn outside of the reset"
ROWS = {"gru": 3, "lstm": 4}


@dataclass(frozen=True)
class _How:
    """One way to compute a recurrence, in words that follow each other."""

    reset: str = ""
    stale: bool = False
    keeps: bool = True
    inside: bool = True

    @property
    def name(self) -> str:
        words = [f"reset {self.reset} the matmul"] if self.reset else []
        words += ["the first state at every step" if self.stale else "each step's state from the last"]
        words += [] if self.keeps else ["(1-z) h + z n"]
        words += [] if self.inside else ["b_hn outside of the reset"]
        return ", ".join(words)


def recurrence_variants(site: Site) -> Iterator[Variant]:
    """By the rule's declaration first; nothing where the boundary is not the output of a recurrent layer."""
    step = next((s for s in site.steps(site.name) if s.group is not None and s.group.sizes), None)
    call = site.calls.get(site.name)
    if step is None or call is None or site.boundary.endswith(INPUT) or step.word not in ROWS:
        return
    inner = site.module.get_submodule(site.name)
    weights = {name: p.detach().double().cpu().numpy() for name, p in inner.named_parameters(recurse=False)}
    args, kwargs = call
    first = kwargs.get("hx", args[1] if len(args) > 1 else None)
    kind = step.group.rule.kind if step.group is not None else None
    declared = getattr(getattr(kind, "cell", None), "reset", "after")
    if declared == "none":
        return
    ways = [_How(stale=stale) for stale in (False, True)]
    if step.word == "gru":
        sides = (declared, "before" if declared == "after" else "after")
        ways = [_How(*how) for how in itertools.product(sides, (False, True), (True, False), (True, False))]
        ways = [how for how in ways if how.inside or how.reset == "after"]
        ways.sort(key=lambda how: (how.reset != declared) + how.stale + (not how.keeps) + (not how.inside))
    for how in ways:
        yield Variant(how.name, lambda seen, how=how: _run(inner, weights, first, seen, site.name, how, step.word))  # type: ignore[misc]


def recurrence_name(ours: str, theirs: str) -> str:
    """By what differs between two ways."""
    words = []
    sides = [name.split(" the matmul")[0] for name in (ours, theirs)]
    if "the matmul" in ours and sides[0] != sides[1]:
        words.append(WRONG_SIDE)
    for said, mistake in (("the first state", STALE), ("(1-z) h", POLARITY), ("outside", OUTSIDE)):
        if (said in ours) != (said in theirs):
            words.append(mistake)
    return " and ".join(words)


def _run(
    inner: torch.nn.Module,
    weights: Mapping[str, Array],
    first: Any,
    seen: Observed,
    name: str,
    how: _How,
    word: str,
) -> Array:
    x = seen.values[name + INPUT]
    batch_first = bool(getattr(inner, "batch_first", False))
    x = x.swapaxes(0, 1) if batch_first else x
    suffixes = [key.removeprefix("weight_ih_") for key in weights if key.startswith("weight_ih_")]
    hidden = weights["weight_hh_l0"].shape[1]
    states = first if isinstance(first, tuple) else (first,)
    given = [
        None if s is None else np.asarray(s.detach().double().cpu().numpy()).reshape(len(suffixes), x.shape[1], hidden)
        for s in states
    ]
    for layer in itertools.count():
        own = [k for k, suffix in enumerate(suffixes) if suffix.removesuffix("_reverse") == f"l{layer}"]
        if not own:
            break
        outs = []
        for k in own:
            back = suffixes[k].endswith("_reverse")
            start = [np.zeros((x.shape[1], hidden)) if s is None else s[k] for s in (*given, None)]
            w = {
                key.removesuffix(f"_{suffixes[k]}"): value
                for key, value in weights.items()
                if key.endswith(f"_{suffixes[k]}")
            }
            out = _states(w, x[::-1] if back else x, start, how, word)
            outs.append(out[::-1] if back else out)
        x = np.concatenate(outs, axis=-1)
    return np.ascontiguousarray(x.swapaxes(0, 1) if batch_first else x)


def _states(w: Mapping[str, Array], x: Array, start: list[Array], how: _How, word: str) -> Array:
    zeros = np.zeros(w["weight_ih"].shape[0])
    wide, b, c = w["weight_hh"].T, w.get("bias_ih", zeros), w.get("bias_hh", zeros)
    given = x @ w["weight_ih"].T + b
    h, cell = start[0], start[1]
    size, states = h.shape[-1], []
    for step in given:
        if word == "lstm":
            i, f, g, o = np.split(step + h @ wide + c, 4, axis=-1)
            now = _sigmoid(f) * cell + _sigmoid(i) * np.tanh(g)
            new = _sigmoid(o) * np.tanh(now)
            h, cell = (h, cell) if how.stale else (new, now)
            states.append(new)
            continue
        gates = _sigmoid(step[:, : 2 * size] + h @ wide[:, : 2 * size] + c[: 2 * size])
        r, z = np.split(gates, 2, axis=-1)
        z = z if how.keeps else 1 - z
        if how.reset == "before":
            inner = (r * h) @ wide[:, 2 * size :] + c[2 * size :]
        else:
            inner = r * (h @ wide[:, 2 * size :] + (c[2 * size :] if how.inside else 0))
            inner = inner + (0 if how.inside else c[2 * size :])
        new = (1 - z) * np.tanh(step[:, 2 * size :] + inner) + z * h
        h = h if how.stale else new
        states.append(new)
    return np.stack(states)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
