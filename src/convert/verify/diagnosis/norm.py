"""Search for another norm: another kind, number of groups, factor or epsilon than the JAX model's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.path_pattern import parse_pattern
from convert.core.value_ops import Add
from convert.layers.norm.mistakes import ADDED, DOUBLED, MISSING
from convert.references.protocol import INPUT, Observed, Variant
from convert.verify.diagnosis.compare import Search, compare_variants, matching_variant
from convert.verify.diagnosis.site import Site

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
FEATURE_NORMS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}  # kind in a rule -> name of the function
CHANNEL_NORMS = ("group_norm", "instance_norm", "batch_norm")
FACTORS = ("weight", "1+weight")
FEATURE_EPSILON = 1e-6  # flax, for LayerNorm and RMSNorm
CHANNEL_EPSILON = 1e-5  # torch and flax, for GroupNorm and BatchNorm
EPSILONS = (1e-3, CHANNEL_EPSILON, FEATURE_EPSILON, 1e-7, 1e-8, 1e-9, 1e-12, 0.0)  # 1e-3: Keras and praxis


@dataclass(frozen=True)
class NormFunction:
    """What a norm computes: its kind (or its groups), what it multiplies by, and its epsilon."""

    kind: str
    factor: str
    epsilon: float

    def __str__(self) -> str:
        return f"{self.kind} x {self.factor}, epsilon {self.epsilon:g}"

    def variant(self, make: Callable[[Observed], Array]) -> Variant:
        """Return the variant that computes this norm."""
        return Variant(str(self), make, params=self)


def declared_norm(site: Site) -> Search:
    """Search for another norm, but only where the PyTorch module computes another one than the rule declares."""
    variants = _variants(site)
    torch = matching_variant(variants, site, site.got)
    if torch is None or torch is variants[0]:
        return Search()
    return _search(site, variants)


def any_norm(site: Site) -> Search:
    """Search for another norm."""
    variants = _variants(site)
    return _search(site, variants) if variants else Search()


def _search(site: Site, variants: list[Variant]) -> Search:
    adds = any(isinstance(op, Add) for step in site.steps(site.name) for part in step.parts for op in part.ops)

    def name_mistake(torch: Variant, jax: Variant) -> str:
        return norm_mistake(torch.params, jax.params, rule_adds=adds)

    return compare_variants(site, variants, site.rule(site.name), name_mistake)


def norm_mistake(torch: NormFunction, jax: NormFunction, *, rule_adds: bool) -> str:
    """Name the mistake by the first property in which the two norms differ.

    Args:
        rule_adds: whether the rule adds the 1 of ``1+scale`` to the weight.
    """
    if torch.kind != jax.kind:
        return f"{FEATURE_NORMS.get(torch.kind, torch.kind)} for {FEATURE_NORMS.get(jax.kind, jax.kind)}"
    if torch.factor != jax.factor:
        if torch.factor == "weight":
            return MISSING
        return DOUBLED if rule_adds else ADDED
    return f"epsilon {torch.epsilon:g} for {jax.epsilon:g}"


def _variants(site: Site) -> list[Variant]:
    """Return the norms that the submodule at the boundary may compute, the declared one first; empty if it is no norm."""
    if site.boundary.endswith(INPUT) or site.name + INPUT not in site.seen.values:
        return []
    module = site.module.get_submodule(site.name)
    return list(_feature_norms(module, site)) or list(_channel_norms(module, site))


def _first(declared: Any, others: Mapping[str, Any] | tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the declared value, then the others."""
    return (declared, *(other for other in others if other != declared))


def _feature_norms(module: torch.nn.Module, site: Site) -> Iterator[Variant]:
    """Yield norms over the last axis."""
    tensors = {name: p.detach().double().cpu().numpy() for name, p in module.named_parameters(recurse=False)}
    weight = next((tensors[name] for name in ("weight", "scale") if name in tensors), None)
    step = next((step for step in site.steps(site.name) if step.kind_name in FEATURE_NORMS), None)
    class_name = type(module).__name__.lower()
    if any(step.kind_name in CHANNEL_NORMS for step in site.steps(site.name)):
        return
    if weight is None or weight.ndim != 1 or (step is None and "norm" not in class_name):
        return
    bias, given = tensors.get("bias"), site.name + INPUT
    kind = step.kind_name if step is not None else "rms_norm" if "rms" in class_name else "layer_norm"
    declared = _declaration(site) if step is not None else {}
    factor = str(declared.get("target_multiplies_by", "weight"))
    epsilon = float(declared.get("epsilon", FEATURE_EPSILON))
    for e, k, f in itertools.product(_first(epsilon, EPSILONS), _first(kind, FEATURE_NORMS), _first(factor, FACTORS)):
        norm = NormFunction(k, f, e)
        yield norm.variant(lambda seen, norm=norm: _feature_norm(seen.values[given], norm, weight, bias))  # type: ignore[misc]


def _channel_norms(module: torch.nn.Module, site: Site) -> Iterator[Variant]:
    """Yield norms over the channels, which are axis 1 in torch; only where the rule declares such a norm."""
    step = next((s for s in site.steps(site.name) if s.kind_name in CHANNEL_NORMS and s.spec.shape), None)
    if step is None:
        return
    declared = _declaration(site)
    w = {n: x.detach().double().cpu().numpy() for n, x in (*module.named_parameters(), *module.named_buffers())}
    epsilons = _first(float(declared.get("epsilon", CHANNEL_EPSILON)), EPSILONS)
    factors = _first(str(declared.get("target_multiplies_by", "weight")), FACTORS)
    given = site.name + INPUT
    if step.kind_name == "batch_norm":
        for e, f in itertools.product(epsilons, factors):
            norm = NormFunction("batch_norm", f, e)
            yield norm.variant(lambda seen, norm=norm: _batch_norm(seen.values[given], norm, w))  # type: ignore[misc]
        return
    channels = step.spec.size
    groups = channels if step.kind_name == "instance_norm" else 1
    counts = _first(
        int(declared.get("num_groups", groups)), tuple(n for n in range(1, channels + 1) if channels % n == 0)
    )
    for n, e, f in itertools.product(counts, epsilons, factors):
        norm = NormFunction(f"{n} groups", f, e)
        yield norm.variant(lambda seen, norm=norm, n=n: _group_norm(seen.values[given], norm, n, w))  # type: ignore[misc]


def _declaration(site: Site) -> dict[str, Any]:
    """Return what the rules declare about the submodule at the boundary; empty where they declare nothing."""
    return next((dict(e) for e in site.plan.layers if parse_pattern(str(e["layer"])).match(site.name) is not None), {})


def _feature_norm(x: Array, norm: NormFunction, weight: Array, bias: Array | None) -> Array:
    if norm.kind == "layer_norm":
        x = x - x.mean(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + norm.epsilon)
    y = y * (1 + weight if norm.factor == "1+weight" else weight)
    out: Array = y if bias is None else y + bias
    return out


def _batch_norm(x: Array, norm: NormFunction, w: Mapping[str, Array]) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        y = (x - _by_channel(x, w["running_mean"])) / np.sqrt(_by_channel(x, w["running_var"]) + norm.epsilon)
    return _affine(y, norm, w)


def _group_norm(x: Array, norm: NormFunction, groups: int, w: Mapping[str, Array]) -> Array:
    grouped = x.reshape(x.shape[0], groups, -1)
    grouped = grouped - grouped.mean(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        y = grouped / np.sqrt(np.square(grouped).mean(-1, keepdims=True) + norm.epsilon)
    return _affine(y.reshape(x.shape), norm, w)


def _affine(y: Array, norm: NormFunction, w: Mapping[str, Array]) -> Array:
    scale = _by_channel(y, w["weight"]) if "weight" in w else 1
    scale = 1 + scale if norm.factor == "1+weight" else scale
    return y * scale + (_by_channel(y, w["bias"]) if "bias" in w else 0)


def _by_channel(x: Array, value: Array) -> Array:
    return value.reshape(1, -1, *[1] * (x.ndim - 2))
