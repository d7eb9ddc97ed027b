"""The leaves of a layer by the keys of its rule, if one rule can have all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from convert.inference.derivation import Tensor
from convert.inference.rule_file.layers.described import DescribedLayer, Facts
from convert.inference.rule_file.layers.fused import (
    by_parts,
    origin,
)
from convert.inference.rule_file.layers.grid import grid_of
from convert.inference.rule_file.layers.rule import (
    CONVOLUTIONS,
    SCALE,
    TRANSPOSED,
    NoWordsError,
    Source,
)
from convert.inference.rule_file.layers.sources import (
    Shapes,
    matrix,
    sources_of,
)
from convert.inference.rule_file.layers.ways import ROLES, ways
from convert.inference.rule_file.leaf_sums import are_alike
from convert.layers.leaf_sums import NEXT

Sources = tuple[tuple[str, tuple[Source, ...]], ...]


def _sources(kind: str, layer: DescribedLayer, facts: Facts, leaves: Shapes) -> Sources:
    """Return the sources of a layer by the rule's keys.

    Raises:
        NoWordsError: the elements of a tensor lie in an order that has no name.
    """
    product = layer.product
    found: list[tuple[str, tuple[Source, ...]]] = []
    for role, tensor in layer.tensors.items():
        if tensor.parts[0].rows_of:  # no leaf has the lengths of its rows
            continue
        if product is None or product.base is not None or tensor is not layer.first:
            rotary = "rope" in facts.get(tensor.name, {})
            key = "from" if kind == "parameter" else ROLES.get(role, "from")
            key = SCALE if kind == TRANSPOSED and role == "weight_norm" else key
            of = sources_of(tensor, leaves, rotary=rotary)
            found.append((key, tuple(map(_with_inputs, of)) if kind == "linear" and role == "weight" else of))
    if product is None:
        return tuple(found)
    two = [("from", product.left), ("times", product.right)]
    if product.base is None:
        return (*((key, (matrix(leaf, leaves),)) for key, leaf in two), *found)
    return (*found, *((f"plus.{key}", (matrix(leaf, leaves),)) for key, leaf in two))


def _with_inputs(source: Source) -> Source:
    """Return a source of a linear weight; of one that a product meets joined with others, the axes of its columns are those of the inputs."""
    groups = source.layout.groups or ()
    known = source.contracted or len(groups) != 2
    return source if known else replace(source, contracted=tuple(sorted({axis.of for axis in groups[1]})))


def is_beside(layer: DescribedLayer, facts: Facts, leaves: Shapes) -> bool:
    """Whether leaves of one shape stand side by side in the same layout."""
    if layer.beside is None or len({leaves.get(part.leaf) for part in layer.first.parts}) > 1:
        return False
    return _are_alike(_sources("parameter", layer, facts, leaves))


def in_one_rule(kind: str, layer: DescribedLayer, facts: Facts, leaves: Shapes) -> Sources | None:
    """Return the sources of a layer by the rule's keys; None where each leaf of the weight needs a rule of its own.

    Raises:
        NoWordsError: the elements of a tensor lie in an order that has no name.
    """
    several = len(set(map(origin, layer.first.parts))) > 1 and layer.product is None
    try:
        sources = _sources(kind, layer, facts, leaves)
    except NoWordsError:
        if several and kind in ("linear", "parameter", *CONVOLUTIONS):
            return None
        raise
    shapes = {source.layout.leaf_shape for _, of in sources[:1] for source in of}
    unequal = kind in CONVOLUTIONS and len(shapes) > 1
    unequal = unequal or not are_alike(source.leaf for _, of in sources[:1] for source in of)
    return sources if _are_alike(sources) and not unequal else None


def in_grid(kind: str, layer: DescribedLayer, leaves: Shapes) -> Sources | None:
    """Return the sources of a layer whose matrix has its rows and its columns from several leaves; None where it has not.

    Raises:
        NoWordsError: the elements of its bias lie in an order that has no name.
    """
    grid = grid_of(layer.first, leaves) if kind == "linear" and layer.product is None else ()
    if not grid or len(ways(layer.first)) > 1:
        return None
    of_weight = ((f"from{NEXT}{k}" if k else "from", of) for k, of in enumerate(grid))
    others = ((ROLES[role], sources_of(tensor, leaves)) for role, tensor in layer.tensors.items() if role != "weight")
    return *of_weight, *others


def _are_alike(sources: Sources) -> bool:
    """Whether leaves of one shape that make a tensor have one layout, which is that of the first."""
    layouts = {(source.layout.leaf_shape, source.layout.axes) for _, of in sources[:1] for source in of}
    return len(layouts) == len({shape for shape, _ in layouts})


def has_unequal_parts(kind: str, layer: DescribedLayer, sources: Sources, leaves: Shapes) -> bool:
    """Whether several leaves are the source of a tensor, and one rule has no words for all."""
    shapes = [leaves[source.leaf] for source in sources[0][1]] if sources else []
    if kind == "embedding":
        return len(shapes) > 1
    below = layer.product is None and not layer.beside
    return kind in ("linear", "parameter") and below and len(set(shapes)) > 1


def have_inputs_below_each_other(layer: DescribedLayer, leaves: Shapes) -> bool:
    """Whether several leaves follow each other along the rows of a matrix over which the product sums, as in ``x @ [a; b]``."""
    if layer.product is not None or len({part.leaf for part in layer.first.parts}) < 2:
        return False
    blocks: list[Source] = []
    with suppress(NoWordsError):
        blocks = [of for block in by_parts({"weight": layer.first}) for of in sources_of(block["weight"], leaves)]
    return any(axis.of in block.contracted for block in blocks for axis in (block.layout.groups or ((),))[0])


def has_taps_by_hand(first: Tensor, sources: Sequence[tuple[str, Sequence[Source]]]) -> bool:
    """Whether the source shifts data itself, by a leaf of which several axes make an axis of the kernel: no dimension numbers name them."""
    source = first.parts[0].evidence.source
    groups = sources[0][1][0].layout.groups or ()
    return (source is None or source.operation != "conv_general_dilated") and any(len(group) > 1 for group in groups)
