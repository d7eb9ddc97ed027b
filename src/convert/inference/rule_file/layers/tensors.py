"""Say what layer some tensors of one module are, and from which leaves they come, with their layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.drafting.like.target import TargetModule
from convert.inference.derivation import NOT_REACHED, Arithmetic, Derivation, Grade, Role, Tensor
from convert.inference.rule_file.layers.fused import (
    alternating,
    below_each_other,
    by_parts,
    in_blocks,
    in_columns,
    in_turns,
    one_below_another,
    origin,
    side_by_side,
)
from convert.inference.rule_file.layers.geometry import geometry_of
from convert.inference.rule_file.layers.grid import grid_of
from convert.inference.rule_file.layers.kind import kind_of, norm_keys
from convert.inference.rule_file.layers.parametrized import LowRankWords, low_rank_words, main_leaf
from convert.inference.rule_file.layers.rule import (
    ALTERNATING,
    ATTENTION,
    BESIDE,
    COLUMNS,
    COMPUTED,
    CONVOLUTIONS,
    IN_TURNS,
    LOW_RANK,
    NORMS,
    ORDERS,
    PARAMETERS,
    PRESCALED,
    SCALE,
    TAPS,
    TRANSPOSED,
    WITH_BOTH,
    ZEROS,
    LayerRule,
    NoWordsError,
    Source,
)
from convert.inference.rule_file.layers.sources import (
    Shapes,
    columns_with_layout,
    has_divided_axis,
    is_divided,
    is_part_of_leaf,
    matrix,
    sources_of,
)
from convert.inference.rule_file.layers.ways import ROLES, has_other_ways, numbers, term_axes, ways
from convert.inference.rule_file.layers.zeros_before import without_zeros, zeros_before
from convert.inference.rule_file.leaf_sums import are_alike
from convert.layers.activations import ACTIVATIONS
from convert.layers.leaf_sums import NEXT
from convert.layers.shared_keys import ASK
from convert.layers.weight_keys import PARAMETRIZATIONS

Facts = Mapping[str, Mapping[str, Any]]  # tensor -> what the programs say of it
Keys = tuple[tuple[str, str], ...]
Sources = tuple[tuple[str, tuple[Source, ...]], ...]
NO_CONSTANT = "the source has no such parameter, and a rule of this kind writes no constant"
GRID = (
    "its rows and its columns come from several leaves, and a rule makes whole rows or whole columns of a tensor; "
    "give the module a layer for each value, such as one for the input and one for the state"
)
OTHER_PARTS = "its bias has other parts than its weight"


@dataclass(frozen=True)
class _Layer:
    """The tensors that one rule makes, in the form that it describes: leaves one below another.

    Attributes:
        tensors: role -> tensor, the weight first.
        first: the first of them as the target has it.
        product: of two leaves, which the weight is, or has added.
        computed_from: the leaves beside the main one of a weight that the source computes; None: it computes none.
        turns: the rows of each leaf in a head or group, where leaves lie in turns.
        beside: how many leaves stand side by side, and along which axis; None: they do not.
        alternate: how many leaves of a table alternate along the last axis; 0: they do not.
    """

    tensors: Mapping[str, Tensor]
    first: Tensor
    product: LowRankWords | None = None
    computed_from: tuple[str, ...] | None = None
    turns: tuple[int, ...] | None = None
    beside: tuple[int, int] | None = None
    alternate: int = 0

    @property
    def grade(self) -> Grade:
        """The weakest of its tensors."""
        return max((tensor.grade for tensor in self.tensors.values()), key=list(Grade).index)

    @property
    def factors(self) -> set[float]:
        """The factors that its elements carry."""
        return {factor for tensor in self.tensors.values() for _, factor in ways(tensor)}


def describe_tensors(
    module: TargetModule, group: Mapping[str, Tensor], facts: Facts, derivation: Derivation
) -> list[LayerRule]:
    """Return the rules of some tensors of a module: one rule, or one for each part of the rows.

    Args:
        module: of the target; its ``kind_name`` is that of the rule, or empty.
        group: role -> tensor.
        facts: about the tensors.
        derivation: which has them.

    Raises:
        NoWordsError: the tensors are not known, or the rule language has no words for them.
    """
    tensors = _known(group)
    if len(group) == 1 and (zeros := zeros_before(next(iter(group.values())))):
        rest = {"weight": without_zeros(next(iter(group.values())), *zeros)}
        rules = describe_tensors(replace(module, kind_name="parameter"), rest, facts, derivation)
        return [replace(rule, target_keys=(*rule.target_keys, (ZEROS, "{} {}".format(*zeros)))) for rule in rules]
    if module.kind_name in ("linear", *CONVOLUTIONS, "") and _has_bias_apart(module, tensors, group, derivation.leaves):
        weight = {role: tensor for role, tensor in group.items() if role != "bias"}
        bias = {} if group["bias"].is_constant else {"weight": group["bias"]}
        apart = describe_tensors(replace(module, kind_name="parameter"), bias, facts, derivation) if bias else []
        return [*describe_tensors(module, weight, facts, derivation), *apart]
    if module.kind_name in ("linear", "") and (columns := columns_with_layout(tensors, derivation.leaves)):
        of_columns = _each_columns(columns, module, facts, derivation)
        orders = (ORDERS, " ".join(map(_order_of_columns, of_columns)))
        return [replace(rule, target_keys=(*rule.target_keys, orders)) for rule in of_columns]
    layer = _as_described(tensors, derivation.leaves)
    said = {key: value for tensor in layer.tensors.values() for key, value in facts.get(tensor.name, {}).items()}
    kind = kind_of(module, layer.tensors, said, layer.first, derivation.leaves, derivation.tensors)
    if kind == "linear" and not module.kind_name and _have_inputs_below_each_other(layer, derivation.leaves):
        kind = "parameter"
    if kind in CONVOLUTIONS and has_divided_axis(layer.first, derivation.leaves):  # permuted within it
        kind = "parameter"
    if kind == "parameter" and len(layer.tensors) > 1:  # no layer: a kernel that data multiplies, and a bias behind it
        alone = replace(module, kind_name=kind)
        each = [describe_tensors(alone, {"weight": tensor}, facts, derivation) for tensor in group.values()]
        return [rule for of in each for rule in of]
    if (
        kind == "parameter"
        and not layer.alternate
        and not _is_beside(layer, facts, derivation.leaves)
        and (columns := in_columns(layer.first))
    ):
        return _each_columns(columns, module, facts, derivation)
    for role, tensor in layer.tensors.items():
        if role != "weight" and any(part.arithmetic is Arithmetic.COMPUTED for part in tensor.parts):
            raise NoWordsError(f"the elements of its {role} are computed from several leaves")
    sources = _in_grid(kind, layer, derivation.leaves) or _in_one_rule(kind, layer, facts, derivation.leaves)
    lengths = layer.tensors.get("weight_norm")
    if (
        kind in CONVOLUTIONS and (sources is None or layer.factors - {1.0} or _has_taps_by_hand(layer.first, sources))
    ) or (
        lengths is not None and len(lengths.parts) > 1
    ):  # only the rules of parameters make a part of a kernel, have a factor, or join what has lengths
        return describe_tensors(replace(module, kind_name="parameter"), group, facts, derivation)
    if sources is None:
        return _by_parts(replace(module, kind_name=kind), layer, facts, derivation)
    if _has_unequal_parts(kind, layer, sources, derivation.leaves):
        with suppress(NoWordsError):
            return _by_parts(replace(module, kind_name=kind), layer, facts, derivation)
    if len(ways(layer.first)) > 1 and kind in ("linear", "parameter"):
        return _by_parts(replace(module, kind_name=kind), layer, facts, derivation)
    if kind == "linear" and layer.turns is not None and layer.turns[0] > 1 and len(set(layer.turns)) == 1:
        groups = layer.first.shape[0] // sum(layer.turns)
        sources = tuple((key, _of_groups(of, groups)) for key, of in sources)
    keys, target_keys = _keys(kind, module, layer, said, derivation)
    if _writes_constants(kind, group):
        target_keys = (*target_keys, (PARAMETERS, "weight and bias"))
    elif kind in WITH_BOTH and not {"weight", "bias"} & group.keys():
        target_keys = (*target_keys, (PARAMETERS, "nothing"))
    whole, names = _names(kind, module, layer)
    geometry = geometry_of(layer.first, said) if kind in CONVOLUTIONS else ()
    evidence, computed = evidence_of(layer.first), layer.computed_from
    return [LayerRule(kind, whole, sources, names, keys, target_keys, geometry, evidence, layer.grade, (), computed)]


def _has_taps_by_hand(first: Tensor, sources: Sequence[tuple[str, Sequence[Source]]]) -> bool:
    """Whether the source shifts data itself, by a leaf of which several axes make an axis of the kernel: no dimension numbers name them."""
    source = first.parts[0].evidence.source
    groups = sources[0][1][0].layout.groups or ()
    return (source is None or source.operation != "conv_general_dilated") and any(len(group) > 1 for group in groups)


def _known(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that leaves are the source of, the weight first.

    Raises:
        NoWordsError: one is not known, or only in part.
    """
    if any(tensor.not_reached for tensor in group.values()):
        raise NoWordsError(NOT_REACHED)
    ordered = sorted(group, key=lambda role: role != "weight")
    tensors = {role: group[role] for role in ordered if not group[role].is_constant}
    if not tensors:
        guessed = any(tensor.grade is Grade.OPEN for tensor in group.values())
        raise NoWordsError("nothing was found that fits" if guessed else "the source has no such parameter")
    if lacking := [tensor for tensor in tensors.values() if not tensor.parts]:
        raise NoWordsError(min(lacking, key=lambda tensor: tensor.unread).lack)
    for tensor in tensors.values():
        known = sum(len(part.elements) for part in tensor.parts)
        if known + tensor.unseen < (size := int(np.prod(tensor.shape))) and tensor.grade is Grade.OPEN:
            some = f"{size - known} of its {size} elements"
            raise NoWordsError(
                f"nothing was found that fits {some}"
                if tensor.guessed
                else f"{some} met nothing but zeros, or no row, in any run, so that no output shows them"
            )
    return tensors


def _has_bias_apart(
    module: TargetModule, tensors: Mapping[str, Tensor], group: Mapping[str, Tensor], leaves: Shapes
) -> bool:
    """Whether the bias has a rule of its own.

    One part of it may be a sum of leaves, and another one a leaf. Its leaf may have axes of size 1 behind its numbers, as it is added
    along another axis than the last; or that axis alone, where the kernel is a vector; or no axis, where it is none. Or the weight has a part of the
    inputs of a leaf, and another module has the rest, or its columns have a rule each; or the bias of a convolution has a part of its leaf, and the kernel a whole one.
    """
    bias = tensors.get("bias")
    if bias is not None and module.kind_name in ("linear", "") and columns_with_layout(tensors, leaves):
        return True
    apart = module.kind_name == "linear" and "bias" in group and "weight" in tensors
    if apart and is_part_of_leaf(tensors["weight"], leaves, inputs=True):
        return True
    if bias is not None and "weight" in tensors and not are_alike(part.leaf for part in bias.parts if part.leaf):
        return True
    if bias is not None and "weight" in tensors and has_other_ways(bias, tensors["weight"]):
        return True
    if bias is None or "weight" not in tensors or len(tensors["weight"].parts) != 1 or len(bias.parts) != 1:
        return False
    of_kernel = tensors["weight"].parts[0].evidence.role is Role.CONVOLUTION and module.kind_name != "linear"
    if of_kernel and is_divided(bias, leaves) and not is_divided(tensors["weight"], leaves):
        return True
    shape = leaves.get(bias.parts[0].leaf, ())
    main = tensors["weight"].parts[0]
    by = main.evidence.source.operation if main.evidence.source is not None else ""
    product = by == "dot_general" or (by == "conv_general_dilated" and module.kind_name == "linear")
    is_vector = len(leaves.get(main.leaf, ())) == len(main.contracted) == 1  # which has no axis of outputs for the bias
    along_another = len(shape) > 1 and shape[-1] == 1 and bias.shape != shape
    is_number = bias.parts[0].leaf in leaves and not shape  # which is added to no axis of outputs
    return product and (along_another or (len(shape) > 0 if is_vector else is_number))


def _as_described(known: Mapping[str, Tensor], leaves: Shapes) -> _Layer:
    """Return tensors in the form that rules describe.

    Raises:
        NoWordsError: the weight is computed from leaves of which none has its elements.
    """
    tensors = dict(known)
    first = next(iter(tensors.values()))
    product = low_rank_words(first, leaves)
    if product is not None:
        if product.base is not None:
            tensors["weight"] = product.base
        return _Layer(tensors, first, product, ())
    if len(first.parts) > 1 and any(part.low_rank for part in first.parts):  # each part has a rule of its own
        return _Layer(tensors, first)
    if any(part.arithmetic is Arithmetic.COMPUTED for part in first.parts):
        main = main_leaf(first, leaves)
        if main is None or "weight" not in tensors:
            raise NoWordsError(COMPUTED)
        tensors["weight"], others = main
        return _Layer(tensors, first, None, others)
    turns = in_turns(first)
    if turns is not None:
        tensors = {role: below_each_other(tensor, turns) for role, tensor in tensors.items()}
    beside = side_by_side(first)
    alternate = 0 if beside else alternating(first)
    if beside or alternate:
        tensors = {"weight": one_below_another(first, *(beside or (alternate,)), alternate=bool(alternate))}
    return _Layer(tensors, first, None, None, turns, beside, alternate)


def _sources(kind: str, layer: _Layer, facts: Facts, leaves: Shapes) -> Sources:
    """Return the sources of a layer by the rule's keys.

    Raises:
        NoWordsError: the elements of a tensor lie in an order that has no name.
    """
    product = layer.product
    found: list[tuple[str, tuple[Source, ...]]] = []
    for role, tensor in layer.tensors.items():
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


def _is_beside(layer: _Layer, facts: Facts, leaves: Shapes) -> bool:
    """Whether leaves of one shape stand side by side in the same layout."""
    if layer.beside is None or len({leaves.get(part.leaf) for part in layer.first.parts}) > 1:
        return False
    return _are_alike(_sources("parameter", layer, facts, leaves))


def _in_one_rule(kind: str, layer: _Layer, facts: Facts, leaves: Shapes) -> Sources | None:
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


def _in_grid(kind: str, layer: _Layer, leaves: Shapes) -> Sources | None:
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


def _has_unequal_parts(kind: str, layer: _Layer, sources: Sources, leaves: Shapes) -> bool:
    """Whether several leaves are the source of a tensor, and one rule has no words for all."""
    shapes = [leaves[source.leaf] for source in sources[0][1]] if sources else []
    if kind == "embedding":
        return len(shapes) > 1
    below = layer.product is None and not layer.beside
    return kind in ("linear", "parameter") and below and len(set(shapes)) > 1


def _by_parts(module: TargetModule, layer: _Layer, facts: Facts, derivation: Derivation) -> list[LayerRule]:
    """Return a rule for each part of the rows, as parts that carry different factors have one.

    Raises:
        NoWordsError: there are no rules for the parts.
    """
    with suppress(NoWordsError):
        return _each_part(by_parts(layer.tensors), module, layer, facts, derivation)
    return _each_part(by_parts(layer.tensors, runs=True), module, layer, facts, derivation)


def _each_part(
    parts: Sequence[Mapping[str, Tensor]], module: TargetModule, layer: _Layer, facts: Facts, derivation: Derivation
) -> list[LayerRule]:
    """Return a rule for each part of the rows.

    Raises:
        NoWordsError: there are no rules for them.
    """
    found: list[LayerRule] = []
    for k, part in enumerate(parts, 1):
        if any(tensor.is_constant for tensor in part.values()):
            raise NoWordsError(NO_CONSTANT)
        keys = (*_in_turns(layer), ("part", f"{k} of {len(parts)}"))
        for rule in describe_tensors(module, part, facts, derivation):
            if layer.turns is not None:
                groups = layer.first.shape[0] // sum(layer.turns)
                rule = replace(rule, sources=tuple((key, _of_groups(of, groups)) for key, of in rule.sources))
            found.append(replace(rule, target_keys=(*rule.target_keys, *keys)))
    if not found:
        raise NoWordsError(OTHER_PARTS if in_blocks(layer.first) else GRID)
    return found


def _each_columns(
    columns: Sequence[Tensor], module: TargetModule, facts: Facts, derivation: Derivation
) -> list[LayerRule]:
    """Return a rule for each of the columns of a matrix that stand side by side.

    Raises:
        NoWordsError: there are no rules for them.
    """
    widths = (COLUMNS, " ".join(str(tensor.shape[1]) for tensor in columns))
    alone = replace(module, kind_name="parameter")
    found = [describe_tensors(alone, {"weight": tensor}, facts, derivation) for tensor in columns]
    parts = [(rule, ("part", f"{k} of {len(columns)}")) for k, of in enumerate(found, 1) for rule in of]
    return [replace(rule, target_keys=(*rule.target_keys, widths, part)) for rule, part in parts]


def _order_of_columns(rule: LayerRule) -> str:
    """Return the start of some columns of a matrix along the leaf's axis, and the places of the axes that they are made of: ``36:0``."""
    axes = (rule.main[0].layout.groups or ((), ()))[1]
    start = min((axis.start for axis in axes if not axis.place), default=0)
    return f"{start}:{','.join(str(axis.place) for axis in axes) or '0'}"


def _of_groups(sources: Sequence[Source], groups: int) -> tuple[Source, ...]:
    """Return sources of which each group has a part of the rows, with the groups as an axis of their own.

    Raises:
        NoWordsError: no axis of a leaf has the groups.
    """
    found = []
    for source in sources:
        first, *rest = source.layout.axes
        if first.size % groups or first.order or first.parts or first.start:
            raise NoWordsError("its leaves lie in the rows in turns, and not group by group")
        if first.size > groups:
            within = replace(first, place=first.place + 1, size=first.size // groups)
            behind = [replace(x, place=x.place + 1) if x.of == first.of else x for x in rest]
            source = replace(source, layout=replace(source.layout, axes=(replace(first, size=groups), within, *behind)))
        found.append(source)
    return tuple(found)


def _in_turns(layer: _Layer) -> Keys:
    return () if layer.turns is None else ((IN_TURNS, " ".join(map(str, layer.turns))),)


def _keys(
    kind: str, module: TargetModule, layer: _Layer, said: Mapping[str, Any], derivation: Derivation
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
    target_keys = (*target_keys, *_in_turns(layer))
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


def _parametrization(module: TargetModule, layer: _Layer) -> str:
    """Return how the module keeps its weight as two tensors; empty: it does not."""
    own = {tensor.name.removeprefix(f"{module.name}.") for tensor in layer.tensors.values()}
    return next((key for key, by_role in PARAMETRIZATIONS.items() if own >= set(by_role.values())), "")


def _writes_constants(kind: str, group: Mapping[str, Tensor]) -> bool:
    """Whether a rule writes a tensor of its layer that the source lacks: zeros for the bias, or ones for the scale."""
    lacking = {role: tensor.parts[0].factor for role, tensor in group.items() if tensor.is_constant}
    has_key = kind == "linear" or kind in NORMS
    return bool(lacking) and has_key and all(factor == (role == "weight") for role, factor in lacking.items())


def _have_inputs_below_each_other(layer: _Layer, leaves: Shapes) -> bool:
    """Whether several leaves follow each other along the rows of a matrix over which the product sums, as in ``x @ [a; b]``."""
    if layer.product is not None or len({part.leaf for part in layer.first.parts}) < 2:
        return False
    blocks: list[Source] = []
    with suppress(NoWordsError):
        blocks = [of for block in by_parts({"weight": layer.first}) for of in sources_of(block["weight"], leaves)]
    return any(axis.of in block.contracted for block in blocks for axis in (block.layout.groups or ((),))[0])


def _names(kind: str, module: TargetModule, layer: _Layer) -> tuple[str, Keys]:
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
    tried = f"; {refuted} of {evidence.tried} candidates refuted" if refuted else ""
    target = evidence.target
    return f"{said} and {target.operation} {_place(target.module, target.where)}".rstrip() + tried


def _place(module: str, where: str) -> str:
    return f"of {module}" if module else f"at {where}" if where else ""
