"""Find which of several functions each of the two models computes at the boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.references.protocol import INPUT, Variant
from convert.verify.diagnosis.site import Site

Array = np.ndarray[Any, np.dtype[Any]]
NameMistake = Callable[[Variant, Variant], str]
UNKNOWN = "another function"


@dataclass(frozen=True)
class Explanation:
    """A hypothesis that restores parity.

    Attributes:
        name: of the mistake, short and stable.
        problem: what is wrong, as a sentence.
        rule: ``file:line`` of the rule that made the layer; empty when no rule did.
        fix: the next step.
        error: the relative error that is left at the boundary under the hypothesis.
        target_known: whether the PyTorch model computes one of the known functions.
    """

    name: str
    problem: str
    rule: str
    fix: str
    error: float
    target_known: bool = True


@dataclass(frozen=True)
class Search:
    """The outcome of a search: the explanation if there is one, and the names of the hypotheses that it ruled out."""

    explanation: Explanation | None = None
    ruled_out: tuple[str, ...] = ()


def compare_variants(site: Site, variants: Sequence[Variant], rule: str, name_mistake: NameMistake) -> Search:
    """Find the variant that each side computes; no explanation where the JAX model computes none, or both the same.

    Args:
        variants: the first is the function that is meant.
        rule: ``file:line`` of the rule that declares the function; empty when no rule does.
        name_mistake: names the mistake from the variants of PyTorch and of JAX.
    """
    jax = matching_variant(variants, site, site.want)
    torch = matching_variant(variants, site, site.got)
    if jax is None or torch is jax:
        return Search(ruled_out=tuple(v.name for v in variants))
    target = f"none of the {len(variants)} functions that were tried" if torch is None else torch.name
    explanation = Explanation(
        name_mistake(torch, jax) if torch is not None else f"{UNKNOWN} for {jax.name}",
        f"{_where(site)}, the target has {target}, and the JAX model {jax.name}",
        rule,
        f"{_fix(variants[0], torch, jax, site)}, or correct the reference if the JAX model does not",
        site.error(jax.make(site.seen)),
        torch is not None,
    )
    return Search(explanation, tuple(v.name for v in variants if v is not jax and v is not torch))


def matching_variant(variants: Sequence[Variant], site: Site, value: Array) -> Variant | None:
    """Return the first variant that gives `value`, if any does."""
    errors = []
    for variant in variants:
        try:
            errors.append(site.error(variant.make(site.seen), value))
        except (KeyError, ValueError, RuntimeError):  # a value was not observed, or has another shape
            errors.append(float("inf"))
    best = int(np.argmin(errors)) if errors else -1
    if best < 0 or not errors[best] <= site.enough:
        return None
    return next(v for v, error in zip(variants, errors, strict=True) if error <= max(10 * errors[best], 1e-14))


def replaced(torch: Variant, jax: Variant) -> str:
    """Name a mistake by both functions: the target computes one in place of the other."""
    return f"{torch.name} for {jax.name}"


def _fix(meant: Variant, torch: Variant | None, jax: Variant, site: Site) -> str:
    """Say what to change in the target, in the words of its configuration where they are known."""
    if torch is not None and torch.fix and jax is meant:
        return torch.fix
    return f"make the target compute {jax.name} {_where(site)}"


def _where(site: Site) -> str:
    return f"in front of {site.name}" if site.boundary.endswith(INPUT) else f"in {site.name}"
