"""Search for another recurrence: where the reset gate is applied, what each step starts from, which state the update gate keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.recurrent.kinds import Recurrent
from convert.programs.rewrites.recurrences.states import STALE
from convert.references.protocol import INPUT, Observed, Variant
from convert.verify.diagnosis.compare import Search, compare_variants
from convert.verify.diagnosis.site import Site

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
WRONG_SIDE = "reset gate on the wrong side of the matmul"
POLARITY = "update gate polarity"
OUTSIDE = "b_hn outside of the reset"
CELLS = ("gru", "lstm")


@dataclass(frozen=True)
class Recurrence:
    """How a recurrent layer computes its steps.

    Attributes:
        reset: whether a GRU applies the reset gate ``before`` or ``after`` the matmul; empty for an LSTM.
        stale: whether every step starts from the first state, and not from the state of the step before.
        keeps: whether a GRU's update gate weights the old state, and not the new one.
        bias_inside: whether a GRU's b_hn is added before the reset gate multiplies.
    """

    reset: str = ""
    stale: bool = False
    keeps: bool = True
    bias_inside: bool = True

    def __str__(self) -> str:
        words = [f"reset {self.reset} the matmul"] if self.reset else []
        words += ["the first state at every step" if self.stale else "each step's state from the last"]
        words += [] if self.keeps else ["(1-z) h + z n"]
        words += [] if self.bias_inside else [OUTSIDE]
        return ", ".join(words)


def other_recurrence(site: Site) -> Search:
    """Search for another recurrence of the layer at the boundary."""
    variants = list(_variants(site))
    if not variants:
        return Search()
    return compare_variants(
        site, variants, site.rule(site.name), lambda torch, jax: recurrence_mistake(torch.params, jax.params)
    )


def recurrence_mistake(torch: Recurrence, jax: Recurrence) -> str:
    """Name the mistake by every property in which the two recurrences differ."""
    differences = {
        WRONG_SIDE: torch.reset != jax.reset,
        STALE: torch.stale != jax.stale,
        POLARITY: torch.keeps != jax.keeps,
        OUTSIDE: torch.bias_inside != jax.bias_inside,
    }
    return " and ".join(name for name, differs in differences.items() if differs)


def _variants(site: Site) -> Iterator[Variant]:
    """Yield the recurrences that the layer may compute, the declared one first; nothing if it is no recurrent layer."""
    step = next((s for s in site.steps(site.name) if s.group is not None and s.group.sizes), None)
    call = site.calls.get(site.name)
    kind = step.group.rule.kind if step is not None and step.group is not None else None
    if (
        step is None
        or call is None
        or site.boundary.endswith(INPUT)
        or not isinstance(kind, Recurrent)
        or kind.kind_name not in CELLS
    ):
        return
    module = site.module.get_submodule(site.name)
    weights = {name: p.detach().double().cpu().numpy() for name, p in module.named_parameters(recurse=False)}
    args, kwargs = call.args, call.kwargs
    initial = kwargs.get("hx", args[1] if len(args) > 1 else None)
    declared = kind.cell.reset
    if declared == "none":
        return
    recurrences = [Recurrence(stale=stale) for stale in (False, True)]
    if step.kind_name == "gru":
        sides = (declared, "before" if declared == "after" else "after")
        recurrences = [
            Recurrence(*how) for how in itertools.product(sides, (False, True), (True, False), (True, False))
        ]
        recurrences = [how for how in recurrences if how.bias_inside or how.reset == "after"]
        recurrences.sort(key=lambda how: (how.reset != declared) + how.stale + (not how.keeps) + (not how.bias_inside))
    for how in recurrences:
        yield Variant(
            str(how),
            lambda seen, how=how: _run(module, weights, initial, seen, site.name, how, step.kind_name),  # type: ignore[misc]
            params=how,
        )


def _run(
    module: torch.nn.Module,
    weights: Mapping[str, Array],
    initial: Any,
    seen: Observed,
    name: str,
    how: Recurrence,
    word: str,
) -> Array:
    x = seen.values[name + INPUT]
    batch_first = bool(getattr(module, "batch_first", False))
    x = x.swapaxes(0, 1) if batch_first else x
    suffixes = [key.removeprefix("weight_ih_") for key in weights if key.startswith("weight_ih_")]
    hidden = weights["weight_hh_l0"].shape[1]
    states = initial if isinstance(initial, tuple) else (initial,)
    given = [
        None if s is None else np.asarray(s.detach().double().cpu().numpy()).reshape(len(suffixes), x.shape[1], hidden)
        for s in states
    ]
    for layer in itertools.count():
        directions = [k for k, suffix in enumerate(suffixes) if suffix.removesuffix("_reverse") == f"l{layer}"]
        if not directions:
            break
        outs = []
        for k in directions:
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


def _states(w: Mapping[str, Array], x: Array, start: list[Array], how: Recurrence, word: str) -> Array:
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
            inner = r * (h @ wide[:, 2 * size :] + (c[2 * size :] if how.bias_inside else 0))
            inner = inner + (0 if how.bias_inside else c[2 * size :])
        new = (1 - z) * np.tanh(step[:, 2 * size :] + inner) + z * h
        h = h if how.stale else new
        states.append(new)
    return np.stack(states)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
