"""Say what layer some tensors of one module are, and from which leaves they come, with their layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from convert.drafting.like.target import TargetModule
from convert.inference.derivation import Arithmetic, Derivation, Role, Tensor
from convert.inference.rule_file.layers.described import DescribedLayer, Facts, as_described, known_tensors
from convert.inference.rule_file.layers.fused import (
    by_parts,
    in_blocks,
    in_columns,
)
from convert.inference.rule_file.layers.geometry import geometry_of
from convert.inference.rule_file.layers.keys import evidence_of, keys_of, names_of, turns_keys, writes_constants
from convert.inference.rule_file.layers.kind import kind_of
from convert.inference.rule_file.layers.layer_sources import (
    has_taps_by_hand,
    has_unequal_parts,
    have_inputs_below_each_other,
    in_grid,
    in_one_rule,
    is_beside,
)
from convert.inference.rule_file.layers.rule import (
    COLUMNS,
    CONVOLUTIONS,
    ORDERS,
    PARAMETERS,
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
)
from convert.inference.rule_file.layers.ways import has_other_ways, ways
from convert.inference.rule_file.layers.zeros_before import without_zeros, zeros_before
from convert.inference.rule_file.leaf_sums import are_alike
from convert.layers.leaf_sums import PLUS

NO_CONSTANT = "the source has no such parameter, and a rule of this kind writes no constant"
GRID = (
    "its rows and its columns come from several leaves, and a rule makes whole rows or whole columns of a tensor; "
    "give the module a layer for each value, such as one for the input and one for the state"
)
NO_SLICES = (
    "a rule has such lengths for rows alone; build the module without this weight norm, or remove it "
    "(torch.nn.utils.parametrize.remove_parametrizations), and run again"
)
OTHER_PARTS = "its bias has other parts than its weight"


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
    tensors = known_tensors(group)
    if "weight" in tensors and (of := tensors["weight"].parts[0].rows_of):
        raise NoWordsError(f"it is the length of each slice of {of}, and {NO_SLICES}")
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
    layer = as_described(tensors, derivation.leaves)
    said = {key: value for tensor in layer.tensors.values() for key, value in facts.get(tensor.name, {}).items()}
    kind = kind_of(module, layer.tensors, said, layer.first, derivation.leaves, derivation.tensors)
    if kind == "linear" and not module.kind_name and have_inputs_below_each_other(layer, derivation.leaves):
        kind = "parameter"
    if kind == "embedding" and any(
        PLUS in part.leaf for part in layer.first.parts
    ):  # only a parameter's rule adds leaves up
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
        and not is_beside(layer, facts, derivation.leaves)
        and (columns := in_columns(layer.first))
    ):
        return _each_columns(columns, module, facts, derivation)
    for role, tensor in layer.tensors.items():
        of_leaves = any(part.arithmetic is Arithmetic.COMPUTED and not part.rows_of for part in tensor.parts)
        if role != "weight" and of_leaves:
            raise NoWordsError(f"the elements of its {role} are computed from several leaves")
    sources = in_grid(kind, layer, derivation.leaves) or in_one_rule(kind, layer, facts, derivation.leaves)
    lengths = layer.tensors.get("weight_norm")
    if (
        kind in CONVOLUTIONS and (sources is None or layer.factors - {1.0} or has_taps_by_hand(layer.first, sources))
    ) or (
        lengths is not None and len(lengths.parts) > 1
    ):  # only the rules of parameters make a part of a kernel, have a factor, or join what has lengths
        return describe_tensors(replace(module, kind_name="parameter"), group, facts, derivation)
    if sources is None:
        return _by_parts(replace(module, kind_name=kind), layer, facts, derivation)
    if has_unequal_parts(kind, layer, sources, derivation.leaves):
        with suppress(NoWordsError):
            return _by_parts(replace(module, kind_name=kind), layer, facts, derivation)
    if len(ways(layer.first)) > 1 and kind in ("linear", "parameter"):
        return _by_parts(replace(module, kind_name=kind), layer, facts, derivation)
    if kind == "linear" and layer.turns is not None and layer.turns[0] > 1 and len(set(layer.turns)) == 1:
        groups = layer.first.shape[0] // sum(layer.turns)
        sources = tuple((key, _of_groups(of, groups)) for key, of in sources)
    keys, target_keys = keys_of(kind, module, layer, said, derivation)
    if writes_constants(kind, group):
        target_keys = (*target_keys, (PARAMETERS, "weight and bias"))
    elif kind in WITH_BOTH and not {"weight", "bias"} & group.keys():
        target_keys = (*target_keys, (PARAMETERS, "nothing"))
    whole, names = names_of(kind, module, layer)
    geometry = geometry_of(layer.first, said) if kind in CONVOLUTIONS else ()
    evidence, computed = evidence_of(layer.first), layer.computed_from
    return [LayerRule(kind, whole, sources, names, keys, target_keys, geometry, evidence, layer.grade, (), computed)]


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


def _by_parts(module: TargetModule, layer: DescribedLayer, facts: Facts, derivation: Derivation) -> list[LayerRule]:
    """Return a rule for each part of the rows, as parts that carry different factors have one.

    Raises:
        NoWordsError: there are no rules for the parts.
    """
    with suppress(NoWordsError):
        return _each_part(by_parts(layer.tensors), module, layer, facts, derivation)
    return _each_part(by_parts(layer.tensors, runs=True), module, layer, facts, derivation)


def _each_part(
    parts: Sequence[Mapping[str, Tensor]],
    module: TargetModule,
    layer: DescribedLayer,
    facts: Facts,
    derivation: Derivation,
) -> list[LayerRule]:
    """Return a rule for each part of the rows.

    Raises:
        NoWordsError: there are no rules for them.
    """
    found: list[LayerRule] = []
    for k, part in enumerate(parts, 1):
        if any(tensor.is_constant for tensor in part.values()):
            raise NoWordsError(NO_CONSTANT)
        keys = (*turns_keys(layer), ("part", f"{k} of {len(parts)}"))
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
