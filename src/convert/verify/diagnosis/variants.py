"""What the two models compute where no weight is wrong: norms, activations, and what a reference knows about (RoPE, masks, ...).

The value at the boundary is computed by each function that is known; the one that gives the JAX model's value and the one
that gives the PyTorch model's tell what each side computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.ops import Add
from convert.layers.activations import ACTIVATIONS, activation_pair
from convert.references.protocol import INPUT, Observed, Reference, Variant
from convert.verify.diagnosis.channel_norm import CHANNEL_NORMS, channel_norm_variants, padding_variants
from convert.verify.diagnosis.recurrence import recurrence_name, recurrence_variants
from convert.verify.diagnosis.site import Site
from convert.verify.mistakes.catalogue import ADDED, DOUBLED, MISSING

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
Name = Callable[[str, str], str]
EPSILONS = (1e-3, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-12, 0.0)  # praxis' batch norm, torch, flax, and others that occur
UNKNOWN = "another function"


@dataclass(frozen=True)
class Found:
    """What the two sides compute.

    Attributes:
        name: of the mistake; empty when the PyTorch model's function is none of those that are known.
        said: in words.
        rule: ``file:line`` of the rule that declares it, if one does.
        repair: what to do.
        after: relative error that is left when the PyTorch model computes what the JAX model does.
    """

    name: str
    said: str
    rule: str
    repair: str
    after: float


def functions(site: Site, reference: Reference, ruled_out: list[str]) -> Found | None:
    """Tries the functions that may be computed at the boundary; those that do not fit are added to `ruled_out`."""
    variants = reference.variants(site.boundary)
    given = _ask(site, [v for v in variants if not v.undoes], "", _mistaken(variants), ruled_out)
    if given is None:
        given = _undone(site, [v for v in variants if v.undoes], ruled_out)
    if given is None and not variants:
        given = _activation(site, ruled_out) if site.boundary.endswith(INPUT) else _activation_before(site, ruled_out)
    return given


def norms(site: Site, ruled_out: list[str], *, declared: bool | None = None) -> Found | None:
    """Tries what a norm at the boundary may compute.

    Args:
        declared: true: only if the PyTorch module computes something else than the rule declares.
    """
    if site.boundary.endswith(INPUT) or site.name + INPUT not in site.seen.values:
        return None
    inner = site.module.get_submodule(site.name)
    variants = list(_norm_variants(inner, site)) or list(channel_norm_variants(inner, site))
    if not variants:
        return None
    if declared:
        now = _nearest(variants, site, site.got)
        if now is None or now is variants[0]:
            return None
    return _ask(site, variants, site.rule(site.name), partial(_norm_name, _adds(site)), ruled_out)


def paddings(site: Site, ruled_out: list[str]) -> Found | None:
    """Where the window of a convolution at the boundary stands, on both sides."""
    variants = list(padding_variants(site))
    return (
        _ask(site, variants, site.rule(site.name), lambda ours, theirs: "another padding", ruled_out)
        if variants
        else None
    )


def recurrences(site: Site, ruled_out: list[str]) -> Found | None:
    """What a recurrent layer at the boundary computes, on both sides."""
    variants = list(recurrence_variants(site))
    return _ask(site, variants, site.rule(site.name), recurrence_name, ruled_out) if variants else None


def _ask(site: Site, variants: Sequence[Variant], rule: str, name: Name, ruled_out: list[str]) -> Found | None:
    """What each side computes, of `variants`; None when the JAX model's function is none of them, or the same."""
    theirs = _nearest(variants, site, site.want)
    ours = _nearest(variants, site, site.got)
    if theirs is None or ours is theirs:
        ruled_out += [v.name for v in variants]
        return None
    ruled_out += [v.name for v in variants if v is not theirs and v is not ours]
    target = ours.name if ours is not None else UNKNOWN
    return Found(
        name(target, theirs.name) if ours is not None else f"{UNKNOWN} for {theirs.name}",
        f"the target computes {target}; the JAX model computes {theirs.name}",
        rule,
        f"{_repair(variants[0], ours, theirs)}, or correct the reference if the JAX model does not",
        site.error(theirs.make(site.seen)),
    )


def _repair(meant: Variant, ours: Variant | None, theirs: Variant) -> str:
    """What to change in the target: in its own words where it is known what it computes in place of what is meant."""
    if ours is not None and ours.repair and theirs is meant:
        return ours.repair
    return f"make the target compute {theirs.name}"


def _nearest(variants: Sequence[Variant], site: Site, value: Array) -> Variant | None:
    """The variant that gives `value`, if any does."""
    errors = []
    for variant in variants:
        try:
            errors.append(site.error(variant.make(site.seen), value))
        except (KeyError, ValueError, RuntimeError):  # a value that was not observed, or does not fit: not this
            errors.append(float("inf"))
    best = int(np.argmin(errors)) if errors else -1
    if best < 0 or not errors[best] <= site.enough:
        return None
    return next(v for v, error in zip(variants, errors, strict=True) if error <= max(10 * errors[best], 1e-14))


def _mistaken(variants: Sequence[Variant]) -> Name:
    """The mistake is what is not the first, which is meant."""
    meant = variants[0].name if variants else ""

    def name(ours: str, theirs: str) -> str:
        if theirs == meant:
            return ours
        return f"{theirs}, in the JAX model" if ours == meant else f"{ours} for {theirs}"

    return name


def _undone(site: Site, variants: Sequence[Variant], ruled_out: list[str]) -> Found | None:
    for variant in variants:
        after = site.error(variant.make(site.seen))
        if after <= site.enough:
            said = f"undoing this in the target's {site.boundary} gives what the JAX model has: {variant.name}"
            return Found(variant.name, said, "", f"correct how the target computes {site.boundary}", after)
        ruled_out.append(variant.name)
    return None


# ---- norms


def _norm_variants(inner: torch.nn.Module, site: Site) -> Iterator[Variant]:
    """By the rule's declaration first; nothing when the submodule is no norm."""
    tensors = {name: p.detach().double().cpu().numpy() for name, p in inner.named_parameters(recurse=False)}
    weight = next((tensors[name] for name in ("weight", "scale") if name in tensors), None)
    step = next((step for step in site.steps(site.name) if step.word in ("layer_norm", "rms_norm")), None)
    if any(step.word in CHANNEL_NORMS for step in site.steps(site.name)):
        return
    if weight is None or weight.ndim != 1 or (step is None and "norm" not in type(inner).__name__.lower()):
        return
    bias = tensors.get("bias")
    layer = next((dict(layer) for layer in site.plan.layers if step is not None and _made(layer, step.name)), {})
    kind = step.word if step is not None else "rms_norm" if "rms" in type(inner).__name__.lower() else "layer_norm"
    factor = str(layer.get("target_multiplies_by", "weight"))
    epsilon = float(layer.get("epsilon", EPSILONS[2]))
    epsilons = (epsilon, *(e for e in EPSILONS if e != epsilon))
    for e in epsilons:
        for k in (kind, *({"layer_norm", "rms_norm"} - {kind})):
            for f in (factor, *({"weight", "1+weight"} - {factor})):
                yield Variant(
                    f"{k} x {f}, epsilon {e:g}",
                    lambda seen, k=k, f=f, e=e: _norm(seen.values[site.name + INPUT], k, weight, f, e, bias),  # type: ignore[misc]
                )


def _made(layer: Any, name: str) -> bool:
    from convert.core.path_pattern import parse_pattern

    return parse_pattern(str(layer["layer"])).match(name.rpartition(".")[0]) is not None


def _norm(x: Array, kind: str, weight: Array, factor: str, epsilon: float, bias: Array | None) -> Array:
    if kind == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + epsilon)
    y = y * (1 + weight if factor == "1+weight" else weight)
    out: Array = y if bias is None else y + bias
    return out


_KINDS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


def _adds(site: Site) -> bool:
    """Whether the rule adds the 1 of ``1+scale`` to the weight."""
    return any(isinstance(op, Add) for step in site.steps(site.name) for part in step.parts for op in part.ops)


def _norm_name(adds: bool, ours: str, theirs: str) -> str:
    """By what differs of ``KIND x FACTOR, epsilon E``."""
    (kind, factor, epsilon), (k, f, e) = (name.replace(" x ", ", ").split(", ") for name in (ours, theirs))
    if kind != k:
        return f"{_KINDS.get(kind, kind)} for {_KINDS.get(k, k)}"
    if factor != f:
        if factor == "weight":
            return MISSING
        return DOUBLED if adds else ADDED
    return f"{epsilon} for {e.removeprefix('epsilon ')}"


# ---- activations


def _activation(site: Site, ruled_out: list[str]) -> Found | None:
    """The input of a layer differs although what came before agrees: perhaps the function in between."""
    known = list(site.evidence.drifted)
    earlier = known[: known.index(site.boundary)]
    shape = site.seen.values[site.boundary].shape
    before = [name for name in earlier if name in site.seen.values and site.seen.values[name].shape == shape]
    if not before:
        return None
    source = before[-1]
    variants = [Variant(name, lambda seen, name=name: _activate(name, seen, source)) for name in ACTIVATIONS]  # type: ignore[misc]
    variants.append(Variant("no activation", lambda seen: seen.values[source]))
    return _ask(site, variants, site.rule(source), lambda ours, theirs: f"{ours} for {theirs}", ruled_out)


def _activation_before(site: Site, ruled_out: list[str]) -> Found | None:
    """A layer's output differs and its input is no boundary: perhaps the function in front of the layer."""
    given = site.seen.values.get(site.name + INPUT)
    if given is None or site.name + INPUT in site.evidence.drifted:
        return None
    known = list(site.evidence.drifted)
    earlier = known[: known.index(site.boundary)]
    before = [name for name in earlier if name in site.seen.values and site.seen.values[name].shape == given.shape]
    layer = site.module.get_submodule(site.name)
    for source in reversed(before):
        variants = [
            Variant(name, lambda seen, name=name, source=source: _run(layer, _activate(name, seen, source)))  # type: ignore[misc]
            for name in ACTIVATIONS
        ]
        found = _ask(site, variants, site.rule(source), lambda ours, theirs: f"{ours} for {theirs}", [])
        if found is not None and UNKNOWN not in found.name:
            return found
    ruled_out += list(ACTIVATIONS) if before else []
    return None


def _run(layer: torch.nn.Module, given: Array) -> Array:
    import torch

    from convert.verify.numerics.lift_torch import lifted

    with torch.no_grad(), lifted():
        device = next(layer.parameters()).device
        return np.asarray(layer(torch.as_tensor(given, device=device)).double().cpu().numpy())


def _activate(name: str, seen: Observed, source: str) -> Array:
    import torch

    return np.asarray(activation_pair(name)[1](torch.tensor(seen.values[source], dtype=torch.float64)).numpy())
