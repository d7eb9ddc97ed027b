"""The further keys of the rule of a layer, the name of its module, and the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.drafting.like.target import TargetModule
from convert.inference.derivation import Derivation, Role, Tensor
from convert.inference.rule_file.layers.described import DescribedLayer
from convert.inference.rule_file.layers.kind import norm_keys
from convert.inference.rule_file.layers.parametrized import LowRankWords
from convert.inference.rule_file.layers.rule import (
    ALTERNATING,
    ATTENTION,
    BESIDE,
    CONVOLUTIONS,
    IN_TURNS,
    LOW_RANK,
    NORMS,
    PRESCALED,
    TAPS,
    NoWordsError,
)
from convert.inference.rule_file.layers.ways import numbers, term_axes
from convert.layers.activations import ACTIVATIONS
from convert.layers.shared_keys import ASK
from convert.layers.weight_keys import PARAMETRIZATIONS

Keys = tuple[tuple[str, str], ...]


def turns_keys(layer: DescribedLayer) -> Keys:
    return () if layer.turns is None else ((IN_TURNS, " ".join(map(str, layer.turns))),)


def keys_of(
    kind: str, module: TargetModule, layer: DescribedLayer, said: Mapping[str, Any], derivation: Derivation
) -> tuple[Keys, Keys]:
    """Return the further keys of a rule, and those of its target.

    Raises:
        NoWordsError: its elements carry a factor that a rule of this kind has no key for.
    """
    proven = derivation.proof is not None  # then the target's own numbers are those of the source
    configured = module.facts if proven else {"num_groups": ASK} if kind == "group_norm" else {}
    scaled = "weight" in layer.tensors
    keys, target_keys = norm_keys(said, configured, scaled=scaled) if kind in NORMS else ((), ())
    if kind in ("linear", *CONVOLUTIONS) and said.get("activation") in ACTIVATIONS:
        keys = (*keys, ("activation", str(said["activation"])))
    if layer.product is not None:
        keys = (*keys, *_product_keys(layer.product))
    keys = (*keys, *numbers(kind, layer.tensors), *term_axes(kind, layer.first))
    if layer.factors not in (set(), {1.0}):
        if len(layer.factors) > 1 or kind not in ("linear", "embedding", "parameter"):
            factors = " and ".join(f"{factor:g}" for factor in sorted(layer.factors))
            raise NoWordsError(f"its elements are multiplied by {factors}")
        keys = (*keys, (PRESCALED, repr(1 / min(layer.factors))))
    target_keys = (*target_keys, *turns_keys(layer))
    if layer.beside:
        target_keys = (*target_keys, (BESIDE, "{} {}".format(*layer.beside)))
    if kind == "parameter" and layer.first.parts[0].evidence.role is Role.CONVOLUTION and len(layer.first.shape) > 2:
        target_keys = (*target_keys, (TAPS, str(len(layer.first.shape) - 2)))
    if layer.alternate:
        target_keys = (*target_keys, (ALTERNATING, str(layer.alternate)))
    if kept := _parametrization(module, layer):
        target_keys = (*target_keys, ("parametrization", kept))
    return keys, target_keys


def _product_keys(product: LowRankWords) -> Keys:
    """Return the keys of a weight that is, or has added, a product of two leaves."""
    key, value = ("plus.scale", repr(product.scale)) if product.base else (PRESCALED, repr(1 / product.scale))
    scale = ((key, value),) if product.scale != 1 else ()
    return (("plus.einsum" if product.base else LOW_RANK, product.letters), *scale)


def _parametrization(module: TargetModule, layer: DescribedLayer) -> str:
    """Return how the module keeps its weight as two tensors; empty: it does not."""
    own = {tensor.name.removeprefix(f"{module.name}.") for tensor in layer.tensors.values()}
    return next((key for key, by_role in PARAMETRIZATIONS.items() if own >= set(by_role.values())), "")


def writes_constants(kind: str, group: Mapping[str, Tensor]) -> bool:
    """Whether a rule writes a tensor of its layer that the source lacks: zeros for the bias, or ones for the scale."""
    lacking = {role: tensor.parts[0].factor for role, tensor in group.items() if tensor.is_constant}
    has_key = kind == "linear" or kind in NORMS
    return bool(lacking) and has_key and all(factor == (role == "weight") for role, factor in lacking.items())


def names_of(kind: str, module: TargetModule, layer: DescribedLayer) -> tuple[str, Keys]:
    """Return the name of the rule's module, or of its tensor, and role -> name of the tensors that are called otherwise."""
    if kind == "parameter":
        return layer.first.name, ()
    if _parametrization(module, layer):
        return module.name, ()
    prefix = f"{module.name}." if module.name else ""
    own = {role: tensor.name.removeprefix(prefix) for role, tensor in layer.tensors.items()}
    names = tuple((role, name) for role, name in own.items() if name != role)
    if module.kind_name == ATTENTION and names and names[0][1].startswith("out_proj."):
        return f"{prefix}out_proj", ()
    return module.name, names


def evidence_of(tensor: Tensor) -> str:
    """Say in one line why the first tensor of a rule is believed."""
    evidence = tensor.parts[0].evidence
    refuted = sum(count for _, count in evidence.refuted)
    if evidence.source is None:
        return ""
    said = f"{evidence.source.operation} {_place(evidence.source.module, evidence.source.where)}".strip()
    tried = f"; {refuted} other {'candidate' if refuted == 1 else 'candidates'} refuted" if refuted else ""
    target = evidence.target
    return f"{said} and {target.operation} {_place(target.module, target.where)}".rstrip() + tried


def _place(module: str, where: str) -> str:
    return f"of {module}" if module else f"at {where}" if where else ""
