"""Join the projections of an attention layer, whose leaves are those of a library's layer, to one `attention` rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from convert.drafting.like.module_patterns import common_pattern
from convert.drafting.like.target import TargetModel
from convert.inference.derivation import Derivation, Grade
from convert.inference.rule_file.computed import gives
from convert.inference.rule_file.joining.patterns import structure
from convert.inference.rule_file.layers.layout import Layout
from convert.inference.rule_file.layers.rule import ATTENTION, LayerRule, Source
from convert.rules.attention_macro import LIBRARIES, Library

Shapes = Mapping[str, tuple[int, ...]]


def join_attention(layers: Sequence[LayerRule], derivation: Derivation, target: TargetModel) -> list[LayerRule]:
    """Return the layers, those of an attention layer as one where the plan of its rule is the derivation."""
    groups: dict[Any, list[tuple[LayerRule, list[LayerRule]]]] = defaultdict(list)
    for whole, parts in _found(layers, derivation.leaves):
        groups[structure(whole)].append((whole, parts))
    joined: dict[LayerRule, LayerRule] = {}
    gone: set[LayerRule] = set()
    for members in groups.values():
        if gives([whole for whole, _ in members], derivation, target):
            for whole, (first, *others) in members:
                joined[first] = whole
                gone.update(others)
    return [joined.get(layer, layer) for layer in layers if layer not in gone]


def _found(layers: Sequence[LayerRule], shapes: Shapes) -> Iterator[tuple[LayerRule, list[LayerRule]]]:
    plain = [layer for layer in layers if layer.kind_name == "linear" and not layer.keys and not layer.target_keys]
    by_leaves = {(tuple(source.leaf for source in layer.main), layer.main[0].layout.fixed): layer for layer in plain}
    for (leaves, fixed), layer in by_leaves.items():
        for name, library in LIBRARIES.items():
            if not leaves[0].endswith(f"/{library.kernels[0]}"):
                continue
            start = leaves[0].removesuffix(f"/{library.kernels[0]}")
            kernels = [f"{start}/{kernel}" for kernel in library.kernels]
            fused, last = by_leaves.get((tuple(kernels[:3]), fixed)), by_leaves.get(((kernels[3],), fixed))
            apart = [by_leaves[key] for leaf in kernels[:3] if (key := ((leaf,), fixed)) in by_leaves]
            parts = [fused] if fused is layer else apart if len(apart) == 3 and apart[0] is layer else []
            if last is not None and parts:
                whole = _joined(name, start, [*parts, last], shapes)
                if whole is not None:
                    yield whole, [*parts, last]
                    break  # flax.nnx has the leaves of flax.linen


def _joined(name: str, start: str, parts: Sequence[LayerRule], shapes: Shapes) -> LayerRule | None:
    """Return the rule of an attention layer; None where its module or its biases are not those of one."""
    library, (first, *_, last) = LIBRARIES[name], parts
    biases = [source.leaf for part in parts for source in dict(part.sources).get("bias", ())]
    if biases not in ([], [f"{start}/{bias}" for bias in library.biases]):
        return None
    module, _, output = last.module.rpartition(".")
    keys: tuple[tuple[str, str], ...] = () if output == "out_proj" else (("output", output),)
    if len(parts) == 2:
        if first.module != module or keys or dict(first.names).get("weight") != "in_proj_weight":
            return None
    else:
        names = [part.module.rpartition(".") for part in parts[:3]]
        if {parent for parent, _, _ in names} != {module} or any(part.names for part in parts):
            return None
        together = common_pattern([own for _, _, own in names])
        if together is None:
            return None
        keys = (("projections", together), *keys)
    sizes = _sizes(library, first.main[0], shapes)
    if sizes is None or not module:
        return None
    said = [("layer", name)] + ([("bias", str(bool(biases)).lower())] if bool(biases) != library.biased else [])
    leaves = tuple(source.leaf for part in parts for _, of in part.sources for source in of)
    layout = first.main[0].layout
    source = Source(start, Layout(layout.leaf_shape, layout.fixed, (), ()))
    weakest = max((part.grade for part in parts), key=list(Grade).index)
    return replace(
        first,
        kind_name=ATTENTION,
        module=module,
        sources=(("from", (source,)),),
        names=(),
        keys=tuple(said),
        target_keys=keys,
        geometry=(("sizes", " ".join(map(str, sizes))),),
        grade=weakest,
        leaves=leaves,
    )


def _sizes(library: Library, query: Source, shapes: Shapes) -> tuple[int, ...] | None:
    """Return the sizes of the width and of the axes of the heads, as the queries' kernel has them."""
    stacked = {axis for axis, _ in query.layout.fixed}
    shape = [size for axis, size in enumerate(shapes[query.leaf]) if axis not in stacked]
    letters = library.inward.split(",")[1].split("->")[0]
    if len(letters) != len(shape):
        return None
    of = dict(zip(letters, shape, strict=True))
    return tuple(of[letter] for letter in f"X{library.heads}")
