"""Say how the source computes a weight from several leaves, or normalises one: a weight norm, a spectral norm, a standardised kernel.

Each way that the rule language has is planned, and its tensors are compared with the values that the source computed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.drafting.axis_letters import Letters, NoLetterError
from convert.drafting.like.target import TargetModel
from convert.drafting.yaml_entry import rule_texts
from convert.inference.derivation import Derivation
from convert.inference.rule_file.drawn import DrawnLeaves, derived_array
from convert.inference.rule_file.joining.joined import join_layers
from convert.inference.rule_file.joining.patterns import structure
from convert.inference.rule_file.layers.layout import Axis, Layout
from convert.inference.rule_file.layers.rule import (
    LOW_RANK,
    SCALE,
    TRANSPOSED,
    LayerRule,
    NoWordsError,
    Source,
    computed_from,
)
from convert.inference.rule_file.printing.entry import entry_of
from convert.layers.step_tensor import expected
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules

NO_WORDS = "in a way that the rule language has no words for"
SAME = 1e-9  # relative: a power iteration in another order of its sums
EPSILONS = ("1e-5", "1e-6", "1e-8", "1e-10", "1e-12", "1e-3", "1e-4")
STEPS = (2, 3, 4, 5)


@dataclass(frozen=True)
class _Way:
    """A way to compute the weight: leaves by the keys of the rule, and further keys."""

    leaves: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, str], ...] = ()


def settle(
    layers: Sequence[LayerRule], derivation: Derivation, target: TargetModel
) -> tuple[list[LayerRule], dict[str, str]]:
    """Return the layers with the keys that say how their weight is computed, and the modules for which there are none."""
    groups: dict[Any, list[LayerRule]] = defaultdict(list)
    for layer in layers:
        if layer.computed_from is not None:
            groups[structure(layer)].append(layer)
    known: dict[LayerRule, LayerRule] = {}
    lost: dict[str, str] = {}
    for members in groups.values():
        said = _settled(members, derivation, target)
        known |= dict(zip(members, said, strict=True)) if said else {}
        lost |= {} if said else {layer.module: _no_words(layer) for layer in members}
    return [known.get(layer, layer) for layer in layers if layer.module not in lost], lost  # nor any part of a tensor


def _no_words(layer: LayerRule) -> str:
    leaves = {*(source.leaf for source in layer.main), *(layer.computed_from or ())}
    return f"{computed_from(leaves)} {NO_WORDS}"


def _settled(members: Sequence[LayerRule], derivation: Derivation, target: TargetModel) -> list[LayerRule] | None:
    ways = [list(_ways(layer, derivation.leaves)) for layer in members]
    for chosen in zip(*ways, strict=True):
        said = [_with(layer, way, derivation.leaves) for layer, way in zip(members, chosen, strict=True)]
        if _is_one_way_of_a_part(members[0]) or gives(said, derivation, target):
            return said
    return None


def _is_one_way_of_a_part(layer: LayerRule) -> bool:
    """Whether a layer makes a part of a tensor, in the one way that is known; the rules of all parts are compared with the tensor."""
    return _has_product(layer) and any(key == "part" for key, _ in layer.target_keys)


def _has_product(layer: LayerRule) -> bool:
    return any(key in (LOW_RANK, "plus.einsum") for key, _ in layer.keys)


def _ways(layer: LayerRule, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[_Way]:
    others = layer.computed_from or ()
    if _has_product(layer):
        yield _Way()
        return
    vectors = [leaf for leaf in others if sum(size > 1 for size in shapes[leaf]) <= 1]
    if not others and layer.kind_name.startswith("conv"):
        for epsilon in EPSILONS:
            yield _Way((), (("weight_standardization", f"(w - mean) / (std + {epsilon})"),))
            yield _Way((), (("weight_standardization", f"(w - mean) / sqrt(var + {epsilon})"),))
    if len(others) == len(vectors) == 1:
        yield _Way((("weight_norm", vectors[0]),))
        if layer.kind_name == TRANSPOSED:
            yield _Way(((SCALE, vectors[0]),))
            for below in EPSILONS:
                yield _Way(((SCALE, vectors[0]),), (("normalization_epsilon", below),))
        yield _Way((("spectral_norm", vectors[0]),))
        for steps in STEPS:
            yield _Way((("spectral_norm.u", vectors[0]),), (("spectral_norm.steps", str(steps)),))
        for epsilon in EPSILONS:
            for key in ("spectral_norm", "weight_norm"):
                yield _Way(((key, vectors[0]),), (("normalization_epsilon", epsilon),))
            for steps in STEPS:
                said = ("spectral_norm.steps", str(steps)), ("normalization_epsilon", epsilon)
                yield _Way((("spectral_norm.u", vectors[0]),), said)
    if len(others) == len(vectors) == 2:
        for u, v in (vectors, vectors[::-1]):
            yield _Way((("spectral_norm.u", u), ("spectral_norm.v", v)))


def _with(layer: LayerRule, way: _Way, shapes: Mapping[str, tuple[int, ...]]) -> LayerRule:
    more = tuple((key, (Source(leaf, _plain(shapes[leaf])),)) for key, leaf in way.leaves)
    return replace(layer, sources=(*layer.sources, *more), keys=(*way.keys, *layer.keys), computed_from=None)


def _plain(shape: tuple[int, ...]) -> Layout:
    return Layout(shape, (), tuple(Axis(k, 0, size) for k, size in enumerate(shape) if size > 1), shape)


def gives(layers: Sequence[LayerRule], derivation: Derivation, target: TargetModel) -> bool:
    """Whether the rules of these layers make their tensors as they were derived."""
    letters = Letters()
    rules, lost = join_layers(layers)
    if lost:
        return False
    try:
        entries = [entry_of(rule, letters, target) for rule in rules]
    except (NoWordsError, NoLetterError):
        return False
    letters.fix_sums()
    axes = "".join(f"  {line}\n" for line in letters.declared())
    head = f"model: m\ntitle: m\n{f'axes:{chr(10)}{axes}' if axes else ''}targets:\n  torch: {{loads: m}}\nrules:\n"
    used = frozenset().union(*(rule.leaves for rule in rules))
    source = DrawnLeaves({leaf: derivation.leaves[leaf] for leaf in used}, arrays=derivation.weights)
    try:
        plan = make_plan(parse_rules(head + "\n\n".join(rule_texts(entries)) + "\n"), source)
    except ConvertError:
        return False
    for step in plan.steps:
        want = derived_array(derivation.tensor(step.name), source)
        if want is None or want.shape != step.spec.shape:
            return False
        if not np.allclose(expected(step, plan.source), want, rtol=SAME, atol=SAME):
            return False
    return bool(plan.steps)
