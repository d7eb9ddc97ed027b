"""Find leaves that belong to a layer elsewhere in the tree: running statistics, weight norms, LoRA pairs, separate biases."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from convert.checkpoints.source import Leaf
from convert.core.path_pattern import escape_path
from convert.drafting.needless import is_counter
from convert.drafting.tree_paths import Paths
from convert.layers.draft import KERNELS, Group, Layer, PathKey

SCALES = ("scale", "gamma", "weight", "w", "g")
BIASES = ("bias", "b", "beta", "offset")
LORA = (("lora_a", "lora_b"), ("lora_A", "lora_B"))
SIGMA = "recomputed from u at every call"
STATISTICS = {"mean": "mean_ema/average", "var": "var_ema/average"}  # of Haiku, below `~`


@dataclass
class Partners:
    """The leaves that layers have elsewhere in the tree.

    Attributes:
        of: layer and role -> path as a rule writes it.
        shapes: likewise -> shape.
        taken: leaves that belong to a layer.
        dropped: leaves that need no rule of their own -> reason.
    """

    of: dict[tuple[tuple[PathKey, ...], str], str] = field(default_factory=dict)
    shapes: dict[tuple[tuple[PathKey, ...], str], tuple[int, ...]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    dropped: dict[str, str] = field(default_factory=dict)

    def get(self, layer: Layer, role: str) -> str | None:
        return self.of.get((layer.steps, role))

    def add(self, layer: Layer, role: str, path: str, leaves: Sequence[str], shape: tuple[int, ...] = ()) -> None:
        self.of[layer.steps, role] = path
        self.shapes[layer.steps, role] = shape
        self.taken.update(leaves)


def find_partners(layers: Sequence[Layer], paths: Paths, known: Mapping[str, Leaf]) -> Partners:
    """Return the companions of all layers; `known` are the leaves of the tree."""
    partners = Partners()
    by_steps = {layer.steps: layer for layer in layers}
    tops = list(dict.fromkeys(name.split("/")[0] for name in known))
    normalized = reparametrized(known)
    for layer in layers:
        for key, g in layer.leaves.items():
            if key in (*SCALES, *BIASES) and sum(n > 1 for n in g.shape) <= 1:
                _flax_statistics(partners, layer, key, paths, known)
                _haiku_statistics(partners, layer, key, paths, known, tops)
            if len(g.leaves) == 1 and g.leaves[0] in normalized:
                _reparametrized(partners, layer, key, normalized[g.leaves[0]], paths)
        _wrapped(partners, layer, by_steps, paths)
        _lora(partners, layer, by_steps, paths)
        _bias(partners, layer, by_steps, paths)
    for layer in layers:  # those that no scale or bias has taken
        _haiku_bare(partners, layer, by_steps, paths, known)
    return partners


def _flax_statistics(partners: Partners, layer: Layer, key: str, paths: Paths, known: Mapping[str, Leaf]) -> None:
    """Add flax statistics: ``params/norm/scale`` has ``batch_stats/norm/mean``."""
    g, path = layer.leaves[key], paths.path(layer.leaves[key].steps)
    if not path.startswith("params/"):
        return
    module = path.removeprefix("params/").rpartition("/")[0]
    moved = {role: ["/".join(["batch_stats", *x.split("/")[1:-1], role]) for x in g.leaves] for role in ("mean", "var")}
    if all(_have_shapes_of(g, leaves, known) for leaves in moved.values()):
        for role, leaves in moved.items():
            partners.add(layer, role, "/".join(filter(None, ["batch_stats", module, role])), leaves)


def _have_shapes_of(g: Group, leaves: Sequence[str], known: Mapping[str, Leaf]) -> bool:
    """Whether these leaves exist and have the shapes of the leaves of a group, in its order."""
    if not all(name in known for name in leaves):
        return False
    shapes = [known[name].spec.shape for name in g.leaves] if g.varies else [g.shape] * len(leaves)
    return [known[name].spec.shape for name in leaves] == shapes


def _haiku_statistics(
    partners: Partners, layer: Layer, key: str, paths: Paths, known: Mapping[str, Leaf], tops: Sequence[str]
) -> None:
    """Add Haiku averages: ``params/norm/scale`` has ``state/norm/~/mean_ema/average``; in a joint tree, without both prefixes."""
    g, path = layer.leaves[key], paths.path(layer.leaves[key].steps)
    statistics = {role: [f"{x.rpartition('/')[0]}/~/{below}" for x in g.leaves] for role, below in STATISTICS.items()}
    if all(_have_shapes_of(g, leaves, known) for leaves in statistics.values()):
        for role, leaves in statistics.items():
            partners.add(layer, role, f"{path.rpartition('/')[0]}/~/{STATISTICS[role]}", leaves)
        _haiku_spare(partners, "", known)
        return
    first, _, module = path.rpartition("/")[0].partition("/")
    for state in tops:
        if state == g.leaves[0].split("/")[0] or not module or escape_path(g.leaves[0].split("/")[0]) != first:
            continue
        moved = {
            role: ["/".join([state, *x.split("/")[1:-1], "~", *below.split("/")]) for x in g.leaves]
            for role, below in STATISTICS.items()
        }
        if not all(_have_shapes_of(g, leaves, known) for leaves in moved.values()):
            continue
        for role, leaves in moved.items():
            partners.add(layer, role, f"{escape_path(state)}/{module}/~/{STATISTICS[role]}", leaves)
        _haiku_spare(partners, state, known)


def _haiku_spare(partners: Partners, state: str, known: Mapping[str, Leaf]) -> None:
    """Drop the values that averages are computed from. Integer counters are dropped with all other counters.

    Args:
        state: the key below which all statistics lie, or none.
    """
    for word in ("hidden", "counter"):
        below = re.compile(rf"{re.escape(state)}/.*/~/[^/]*_ema/{word}" if state else rf".*/~/[^/]*_ema/{word}")
        found = {name for name in known if below.fullmatch(name)}
        if found and not any(is_counter(known[name]) for name in found):
            partners.taken |= found
            partners.dropped["/".join(filter(None, (escape_path(state), f"**/~/*_ema/{word}")))] = (
                "the averages are computed from it"
            )


def _one_tree(known: Mapping[str, Leaf]) -> bool:
    """Whether Haiku's parameters and state are in one tree: the scale of a norm is next to its averages, or at the top."""
    averaged = [name.removesuffix("/~/mean_ema/average") for name in known if name.endswith("/~/mean_ema/average")]
    return any("/" not in norm or f"{norm}/scale" in known or f"{norm}/offset" in known for norm in averaged)


def _haiku_bare(partners: Partners, layer: Layer, by_steps: Mapping[tuple[PathKey, ...], Layer], paths: Paths, known: Mapping[str, Leaf]) -> None:  # fmt: skip
    """Yield Haiku norms without scale and offset, which have only ``state/norm/~/mean_ema/average``."""
    twin = (
        by_steps.get((*layer.steps[:-1], PathKey(("var_ema",))))
        if layer.steps[-1:] == (PathKey(("mean_ema",)),)
        else None
    )
    mean, var = layer.leaves.get("average"), twin.leaves.get("average") if twin else None
    if mean is None or var is None or mean.shape != var.shape or partners.taken & set(mean.leaves):
        return
    partners.add(layer, "mean", paths.path(mean.steps), mean.leaves, mean.shape)
    partners.add(layer, "var", paths.path(var.steps), var.leaves, var.shape)
    _haiku_spare(partners, "" if _one_tree(known) else mean.leaves[0].split("/")[0], known)


def reparametrized(known: Mapping[str, Leaf]) -> dict[str, dict[str, str]]:
    """Return the leaves that normalize a weight at every call, by the name of the weight: role -> name of a leaf.

    ``params/block/Dense_0/kernel`` (or ``block/Dense_0/kernel``) has ``params/block/WeightNorm_0/Dense_0/kernel/scale`` or, in ``batch_stats``, ``u`` and ``sigma``
    (flax linen); ``sn/layer/weight`` next to ``sn/inference`` has two vectors in Equinox's State, which has them in the order of the
    layers: ``1/0/0`` and ``1/0/1``.
    """
    found: dict[str, dict[str, str]] = {}
    for name in known:
        *keys, role = name.split("/")
        if role == "scale":  # below `params/`, or where that collection alone is the tree
            _of_kernel(found, known, (), keys, "weight_norm", name)
        elif keys[:1] == ["batch_stats"] and role in ("u", "sigma"):
            _of_kernel(found, known, ("params",), keys[1:], "spectral_norm" if role == "u" else "sigma", name)
    wrapped: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for name, leaf in known.items():
        shape = leaf.spec.shape
        if (
            name.endswith("/layer/weight")
            and f"{name.removesuffix('/layer/weight')}/inference" in known
            and len(shape) > 1
        ):
            wrapped.setdefault(((shape[0],), (math.prod(shape[1:]),)), []).append(name)
    for sizes, weights in wrapped.items():
        pairs = [
            (name, other)
            for name in known
            if re.fullmatch(r"1/[0-9]+/0", name) and (other := f"{name[:-1]}1") in known and f"{name[:-1]}2" not in known
            and (known[name].spec.shape, known[other].spec.shape) == sizes
        ]  # fmt: skip
        for weight, (u, v) in zip(weights, pairs, strict=False):
            found[weight] = {"spectral_norm": u, "spectral_norm_v": v}
    return found


def _of_kernel(
    found: dict[str, dict[str, str]],
    known: Mapping[str, Leaf],
    root: Sequence[str],
    keys: Sequence[str],
    role: str,
    name: str,
) -> None:
    """Add a leaf to the kernel with the same path, except for the module that normalizes it."""
    for k in range(len(keys) - 1):
        kernel = "/".join((*root, *keys[:k], *keys[k + 1 :]))
        if kernel in known and len(known[kernel].spec.shape) > 1:
            found.setdefault(kernel, {})[role] = name


def _reparametrized(partners: Partners, layer: Layer, key: str, found: Mapping[str, str], paths: Paths) -> None:
    """Add the leaves of the weight norms of flax linen and Equinox."""
    for role, name in found.items():
        path = paths.path([PathKey((k,)) for k in name.split("/")])
        if role == "sigma":
            partners.taken.add(name)
            partners.dropped[path] = SIGMA
        else:
            partners.add(layer, role, path, [name])


def _wrapped(partners: Partners, layer: Layer, by_steps: Mapping[tuple[PathKey, ...], Layer], paths: Paths) -> None:
    """Add the leaves of nnx's weight norms, ``scales/('kernel',)`` and ``batch_stats/('kernel', 'u')``, and Equinox's ``g``."""
    for key, g in layer.leaves.items():
        inside = re.findall(r"'([^']+)'", key)
        container = layer.steps[-1].words[0] if layer.steps else ""
        role = {"scales": "weight_norm", "batch_stats": "spectral_norm"}.get(container)
        if role and key.startswith("(") and inside:
            last = inside.pop() if role == "spectral_norm" else "u"
            words = ("layer_instance", *inside[:-1])
            owner = by_steps.get((*layer.steps[:-1], *(PathKey((word,)) for word in words)))
            if owner is None or not inside or inside[-1] not in owner.leaves:
                continue
            if len(owner.leaves[inside[-1]].leaves) != len(g.leaves):
                continue
            if last == "u":
                partners.add(owner, role, paths.path(g.steps), g.leaves)
            elif last == "sigma":
                partners.taken.update(g.leaves)
                partners.dropped[paths.drop(g)] = SIGMA
    owner = by_steps.get((*layer.steps, PathKey(("layer",))))
    scale = layer.leaves.get("g")
    weight = owner.leaves.get("weight") if owner else None
    if owner is None or scale is None or weight is None or len(weight.leaves) != len(scale.leaves):
        return
    if len(scale.shape) == len(weight.shape) > 1:
        partners.add(owner, "weight_norm", paths.path(scale.steps), scale.leaves)
        partners.of[owner.steps, "normalization_epsilon"] = "0"


def _lora(partners: Partners, layer: Layer, by_steps: Mapping[tuple[PathKey, ...], Layer], paths: Paths) -> None:
    """Add a LoRA pair in the dict of the layer, in a dict ``lora`` (flax nnx LoRALinear) or around it (nnx LoRA)."""
    for first, second in LORA:
        if not (first in layer.leaves and second in layer.leaves):
            continue
        a, b = layer.leaves[first], layer.leaves[second]
        for steps in (layer.steps, layer.steps[:-1], (*layer.steps, PathKey(("base_module",)))):
            owner = by_steps.get(steps)
            kernel = owner.find(KERNELS, (2,)) if owner else None
            if owner is None or kernel is None or (steps == layer.steps[:-1] and layer.hint != "lora"):
                continue
            fits = owner.leaves[kernel].shape == (*a.shape[:1], *b.shape[1:]) and a.shape[1:] == b.shape[:1]
            if fits and len(a.leaves) == len(b.leaves) == len(owner.leaves[kernel].leaves):
                partners.add(owner, "lora_a", paths.path(a.steps), a.leaves, a.shape)
                partners.add(owner, "lora_b", paths.path(b.steps), b.leaves, b.shape)
                partners.of[owner.steps, "lora_of"] = "nnx" if steps != layer.steps else ""


def _bias(partners: Partners, layer: Layer, by_steps: Mapping[tuple[PathKey, ...], Layer], paths: Paths) -> None:
    """Add praxis biases: ``hidden_layer/linear/w`` has ``hidden_layer/bias/b``."""
    kernel = layer.find(KERNELS, (2,)) if len(layer.leaves) == 1 and layer.hint == "linear" else None
    bias_layer = by_steps.get((*layer.steps[:-1], PathKey(("bias",))))
    if kernel is None or bias_layer is None or set(bias_layer.leaves) != {"b"}:
        return
    w, b = layer.leaves[kernel], bias_layer.leaves["b"]
    if b.shape == w.shape[1:] and len(w.leaves) == len(b.leaves):
        partners.add(layer, "bias", paths.path(b.steps), b.leaves, b.shape)
