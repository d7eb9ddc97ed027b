"""Say what kind of layer the tensors of a module are, and from which leaves they come, with their layouts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.drafting.like.target import TargetModel, TargetModule, join
from convert.inference.derivation import Arithmetic, Derivation, Fact, Grade, Part, Role, Tensor
from convert.inference.rule_file.buffers import is_own
from convert.inference.rule_file.cells import KINDS, layers_of, name_cell
from convert.inference.rule_file.layout import Axis, Layout, read_layout
from convert.inference.rule_file.parametrized import (
    LowRankWords,
    below_each_other,
    by_parts,
    in_turns,
    is_norm_of_rows,
    low_rank_words,
    main_leaf,
    one_below_another,
    side_by_side,
    with_parametrizations,
)
from convert.layers import KINDS as LAYER_KINDS
from convert.layers.activations import ACTIVATIONS
from convert.layers.conv.padding import Geometry, torch_padding, torch_transposed_padding
from convert.layers.norm.layer_rms import Norm
from convert.layers.shared_keys import ASK
from convert.layers.weight_keys import PARAMETRIZATIONS

NORMS = tuple(name for name, kind in LAYER_KINDS.items() if issubclass(kind, Norm))
ATTENTION = "attention"
PRESCALED = "prescaled_by"
PARAMETERS = "parameters"
NOT_WRITTEN = "the source has no such parameter, and a rule of this kind writes no constant"
IN_TURNS = "in turns"  # no key: how many leaves lie in the rows head by head, and the rows of a head
BESIDE = "side by side"  # no key: how many leaves stand side by side in the columns
LOW_RANK = "low_rank"  # no key: how the two matrices of the equation are stored
CONVOLUTIONS = ("conv", "conv_transpose")
CAUSAL = "CAUSAL"  # flax's word
PADDED = "padded"  # what the target's module pads, where other code does the rest
SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
ROLES = {
    "weight": "from",
    "bias": "bias",
    "running_mean": "mean",
    "running_var": "var",
    "weight_norm": "weight_norm",
}  # of a tensor -> the rule's key
PARAMETRIZED_ROLES = {name: role for by_role in PARAMETRIZATIONS.values() for role, name in by_role.items()}
WORDS = {
    Role.PRODUCT: "linear",
    Role.CONVOLUTION: "conv",
    Role.LOOKUP: "embedding",
}


@dataclass(frozen=True)
class Source:
    """Where a tensor, or a block of its rows, comes from.

    Attributes:
        leaf: its name.
        layout: of the leaf in the block.
        contracted: axes of the leaf that a product sums over.
    """

    leaf: str
    layout: Layout
    contracted: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerRule:
    """What a rule says of one module.

    Attributes:
        kind_name: of the rule.
        module: of the target; the full name of the tensor for a parameter.
        sources: key of the rule (``from``, ``bias``, ...) -> the sources, of a fused tensor several, one block of rows each.
        names: role -> name of the tensor in the module, where it is another one.
        keys: what else the rule says of the source (``epsilon``, ``activation``, ...), as YAML.
        target_keys: what else it says of the target, as YAML.
        geometry: of a convolution: what it was given, and what was found of it.
        evidence: why it is believed, in one line.
        grade: the weakest of its tensors.
        leaves: of a cell, whose one source is the path that they lie below: their names.
        computed_from: of a weight that the source computes: the leaves beside the main one, until `computed` says how.
    """

    kind_name: str
    module: str
    sources: tuple[tuple[str, tuple[Source, ...]], ...]
    names: tuple[tuple[str, str], ...] = ()
    keys: tuple[tuple[str, str], ...] = ()
    target_keys: tuple[tuple[str, str], ...] = ()
    geometry: tuple[tuple[str, str], ...] = ()
    evidence: str = ""
    grade: Grade = Grade.DERIVED
    leaves: tuple[str, ...] = ()
    computed_from: tuple[str, ...] | None = None

    @property
    def main(self) -> tuple[Source, ...]:
        """The sources of the first key."""
        return self.sources[0][1]


@dataclass(frozen=True)
class Layers:
    """The rules of all modules, one each.

    Attributes:
        found: the rules.
        open: tensors that no rule makes, with the reason.
    """

    found: tuple[LayerRule, ...]
    open: Mapping[str, str]


def describe_layers(derivation: Derivation, target: TargetModel) -> Layers:
    """Describe every module of the target that has tensors."""
    facts = _facts_of(derivation.facts)
    found: list[LayerRule] = []
    unknown: dict[str, str] = {}
    known = {name: tensor for tensor in derivation.tensors for name in (tensor.name, *tensor.also)}
    done: set[str] = set()
    for module in with_parametrizations(target):
        if module.kind_name in KINDS:
            cells, lost = _cells(module, known, derivation)
            found += cells
            unknown |= lost
            continue
        own = {
            last: known[full]
            for last in module.tensors
            if (full := join(module.name, last)) in known and known[full].name not in done and not is_own(known[full])
        }
        root = not module.name and module.kind_name != ATTENTION  # a rule for a layer needs the name of its module
        alone = module.kind_name == "linear" and set(own) == {"bias"}  # the weight is tied to a table
        if root or alone or not is_norm_of_rows(own) or any(side_by_side(tensor) for tensor in own.values()):
            module = replace(module, kind_name="parameter")  # a rule for a layer has no words for it
        for kind_name, group in _groups(module, own):
            done |= {tensor.name for tensor in group.values()}
            described = _describe(replace(module, kind_name=kind_name), group, facts, derivation)
            if isinstance(described, str):
                unknown |= dict.fromkeys((tensor.name for tensor in group.values()), described)
            else:
                found += described
                written = any(key == PARAMETERS for layer in described for key, _ in layer.target_keys)
                unknown |= {t.name: NOT_WRITTEN for t in group.values() if _constant(t) and not written}
    return Layers(tuple(found), unknown)


def _cells(
    module: TargetModule, known: Mapping[str, Tensor], derivation: Derivation
) -> tuple[list[LayerRule], dict[str, str]]:
    """Return the rules of a recurrent module, one for each layer and direction, and the tensors without one."""
    found: list[LayerRule] = []
    unknown: dict[str, str] = {}
    for suffix, names in layers_of(list(module.tensors)).items():
        tensors = {
            name.removesuffix(f"_{suffix}" if suffix else ""): known[full]
            for name in names
            if (full := join(module.name, name)) in known
        }
        complete = len(tensors) == len(names) and all(tensor.parts for tensor in tensors.values())
        activation = str(module.facts.get("activation", "tanh"))
        cell = name_cell(module.kind_name, tensors, derivation.leaves, activation) if complete else None
        if cell is None:
            why = "no cell of the rule language gives these tensors" if complete else ""
            unknown |= {tensor.name: why or tensor.lack for tensor in tensors.values()}
            continue
        width = sum(length for _, length in cell.inputs)
        inputs = (
            (Axis(0, 0, width, parts=cell.inputs),) if cell.inputs else ()
        )  # no leaf's axis: that of the cell's input
        source = Source(cell.start, Layout((width,), (), inputs, ()))
        weakest = max((tensor.grade for tensor in tensors.values()), key=list(Grade).index)
        layer = suffix.removesuffix("_reverse")
        keys: tuple[tuple[str, str], ...] = (("direction", "backward"),) if layer != suffix else ()
        keys += () if "bias_ih" in tensors else (("bias", "false"),)
        leaves = tuple(dict.fromkeys(p.leaf for tensor in tensors.values() for p in tensor.parts if p.leaf))
        evidence = _evidence(tensors["weight_ih"])
        place = f"{module.name}.{layer}"
        found.append(
            LayerRule(
                module.kind_name, place, (("from", (source,)),), (), cell.keys, keys, (), evidence, weakest, leaves
            )
        )
    return found, unknown


def _facts_of(facts: Sequence[Fact]) -> Mapping[str, Mapping[str, Any]]:
    """Return the facts by the tensors that they belong to."""
    found: dict[str, dict[str, Any]] = {}
    for fact in facts:
        for tensor in fact.tensors:
            found.setdefault(tensor, {})[fact.name] = fact.value
    return found


def _groups(module: TargetModule, own: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the tensors of a module that one rule makes, by their role, with the kind of layer."""
    kind = module.kind_name
    if kind == "attention":
        for weight, bias in (("in_proj_weight", "in_proj_bias"), ("out_proj.weight", "out_proj.bias")):
            yield kind, {role: own[name] for role, name in (("weight", weight), ("bias", bias)) if name in own}
        rest = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        yield from ((kind, {name: own[name]}) for name in own if name not in rest)
    elif kind != "parameter" and (kind or set(own) <= {*ROLES, *PARAMETRIZED_ROLES}):
        kept = {name: tensor for name, tensor in own.items() if name != "num_batches_tracked"}
        roles = {name: _role(name, tensor) for name, tensor in kept.items()}
        more = []
        if len({*roles.values()}) < len(roles):  # a subclass has more than the layer that it extends
            more = [name for name in kept if name not in ROLES and name not in PARAMETRIZED_ROLES]
        yield kind, {roles[name]: tensor for name, tensor in kept.items() if name not in more}
        yield from (("parameter", {"weight": kept[name]}) for name in more)
    else:
        yield from ((kind, {"weight": tensor}) for tensor in own.values())


def _role(name: str, tensor: Tensor) -> str:
    """Return what a tensor is in its module: that of its name, or what it does."""
    if name in ROLES:
        return name
    if name in PARAMETRIZED_ROLES:
        return PARAMETRIZED_ROLES[name]
    return "bias" if tensor.parts and tensor.parts[0].evidence.role is Role.SHIFT else "weight"


def _describe(
    module: TargetModule, group: Mapping[str, Tensor], facts: Mapping[str, Mapping[str, Any]], derivation: Derivation
) -> list[LayerRule] | str:
    """Return the rules of some tensors of a module, or why there are none: one rule, or one for each part of the rows."""
    tensors = {
        role: group[role] for role in sorted(group, key=lambda role: role != "weight") if not _constant(group[role])
    }
    if not tensors:
        return "the source has no such parameter"
    first = tensors.get("weight", next(iter(tensors.values())))
    if lacking := [tensor for tensor in tensors.values() if not tensor.parts]:
        return min(lacking, key=lambda tensor: tensor.unread).lack
    if module.kind_name in ("linear", "conv", "") and (bias := _of_another_shape(tensors, derivation)) is not None:
        apart_rules: list[LayerRule] = []
        for kind_name, of in ((module.kind_name, {k: t for k, t in group.items() if k != "bias"}), ("parameter", bias)):
            described = _describe(replace(module, kind_name=kind_name), of, facts, derivation)
            if isinstance(described, str):
                return described
            apart_rules += described
        return apart_rules
    for tensor in tensors.values():
        known = sum(len(part.elements) for part in tensor.parts)
        if known + tensor.unseen < (size := int(np.prod(tensor.shape))) and tensor.grade is Grade.OPEN:
            return f"{size - known} of its {size} elements meet nothing but zeros, so that no output shows them"
    others: tuple[str, ...] | None = None
    words = low_rank_words(first, derivation.leaves) if first.parts else None
    if words is not None and words.base is not None:
        tensors["weight"], others = words.base, ()
    elif words is None and any(part.arithmetic is Arithmetic.COMPUTED for part in first.parts):
        computed = main_leaf(first, derivation.leaves)
        if computed is None or "weight" not in tensors:
            return "it is computed from several leaves"
        tensors["weight"], others = computed
    turns = in_turns(first) if first.parts and words is None and others is None else None
    if turns is not None:
        tensors = {role: below_each_other(tensor, *turns) for role, tensor in tensors.items()}
    beside = side_by_side(first) if others is None else 0
    if beside:
        tensors = {"weight": one_below_another(first, beside)}
    said = {key: value for tensor in tensors.values() for key, value in facts.get(tensor.name, {}).items()}
    kind = _kind(module, tensors, said)
    if kind == "embedding" and _is_permuted(first, derivation):  # a table that is stored as width x entries
        kind = "parameter"
    alone = not module.kind_name and first.name.removeprefix(f"{module.name}.") != "weight"
    if kind == "linear" and alone and _is_part_of_leaf(first, derivation):
        kind = "parameter"  # a rule names the modules that have the parts of a leaf, and these have one
    if kind == "parameter" and len(tensors) > 1:  # no layer: a kernel that data multiplies, and a bias behind it
        each = [_describe(replace(module, kind_name=kind), {"weight": t}, facts, derivation) for t in group.values()]
        wrong = [of for of in each if isinstance(of, str)]
        return wrong[0] if wrong else [rule for of in each if not isinstance(of, str) for rule in of]
    sources: list[tuple[str, tuple[Source, ...]]] = []
    for role, tensor in tensors.items():
        if words is not None and tensor is first and words.base is None:
            others = ()
            continue
        found = _sources(tensor, derivation.leaves, rotary="rope" in facts.get(tensor.name, {}))
        if found is None:
            return "its elements lie in an order that has no name"
        sources.append(("from" if kind == "parameter" else ROLES.get(role, "from"), found))
    whole = first.name if kind == "parameter" else module.name
    own = {tensor.name.removeprefix(f"{module.name}.") for tensor in tensors.values()}
    names: tuple[tuple[str, str], ...] = ()
    parametrization = next((key for key, by_role in PARAMETRIZATIONS.items() if own >= set(by_role.values())), "")
    if kind != "parameter" and not parametrization:
        names = tuple(
            (role, last)
            for role, tensor in tensors.items()
            if (last := tensor.name.removeprefix(f"{module.name}." if module.name else "")) != role
        )
        if module.kind_name == "attention" and names and names[0][1].startswith("out_proj."):
            whole, names = f"{module.name}.out_proj" if module.name else "out_proj", ()
    weakest = max((tensor.grade for tensor in tensors.values()), key=list(Grade).index)
    proven = derivation.proof is not None  # then the target's own numbers are those of the source
    configured = module.facts if proven else {"num_groups": ASK} if kind == "group_norm" else {}
    keys, target_keys = _norm_keys(said, configured) if kind in NORMS else ((), ())
    if kind in ("linear", *CONVOLUTIONS) and said.get("activation") in ACTIVATIONS:
        keys = (*keys, ("activation", str(said["activation"])))
    if words is not None:
        more, said_of = _low_rank(words, derivation)
        sources = [*sources, *more] if words.base is not None else [*more, *sources]
        keys = (*keys, *said_of)
    widths = [derivation.leaves[source.leaf] for source in sources[0][1]] if sources else []
    tables = kind == "embedding" and len(widths) > 1
    if tables or (kind == "linear" and words is None and turns is None and not beside and len(set(widths)) > 1):
        apart = _by_parts(module, tensors, facts, derivation, turns)
        if not isinstance(apart, str):
            return apart
    factors = {
        part.factor for tensor in tensors.values() for part in tensor.parts if part.arithmetic is Arithmetic.SAME
    }
    if factors != {1.0} and factors:
        if len(factors) > 1 and kind == "linear" and len(first.parts) > 1:
            return _by_parts(module, tensors, facts, derivation, turns)
        if len(factors) > 1 or kind not in ("linear", "embedding", "parameter") or min(factors) <= 0:
            return f"its elements are multiplied by {' and '.join(f'{factor:g}' for factor in sorted(factors))}"
        keys = (*keys, (PRESCALED, repr(1 / factors.pop())))
    geometry = _geometry(first, said) if kind in CONVOLUTIONS else ()
    if _of_constants(kind, group):
        target_keys = (*target_keys, (PARAMETERS, "weight and bias"))
    if turns is not None:
        target_keys = (*target_keys, (IN_TURNS, " ".join(map(str, turns))))
    if beside:
        target_keys = (*target_keys, (BESIDE, str(beside)))
    if parametrization:
        target_keys = (*target_keys, ("parametrization", parametrization))
    return [
        LayerRule(
            kind, whole, tuple(sources), names, keys, target_keys, geometry, _evidence(first), weakest, (), others
        )
    ]


def _of_another_shape(tensors: Mapping[str, Tensor], derivation: Derivation) -> dict[str, Tensor] | None:
    """Return the bias alone, if its leaf has axes of size 1 behind its numbers: it is added along another axis than the last."""
    bias = tensors.get("bias")
    if bias is None or "weight" not in tensors or len(tensors["weight"].parts) != 1 or len(bias.parts) != 1:
        return None
    shape = derivation.leaves.get(bias.parts[0].leaf, ())
    main = tensors["weight"].parts[0]
    product = main.evidence.source is not None and main.evidence.source.operation == "dot_general"
    return {"weight": bias} if product and len(shape) > 1 and shape[-1] == 1 and bias.shape != shape else None


def _by_parts(
    module: TargetModule,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Mapping[str, Any]],
    derivation: Derivation,
    turns: tuple[int, int] | None,
) -> list[LayerRule] | str:
    """Return a rule for each part of the rows, as parts that carry different factors have one; or why there are none."""
    found: list[LayerRule] = []
    parts = by_parts(tensors)
    for k, part in enumerate(parts, 1):
        if any(map(_constant, part.values())):
            return NOT_WRITTEN
        described = _describe(module, part, facts, derivation)
        if isinstance(described, str):
            return described
        layout = () if turns is None else ((IN_TURNS, " ".join(map(str, turns))),)
        of = (*layout, ("part", f"{k} of {len(parts)}"))
        found += (replace(layer, target_keys=(*layer.target_keys, *of)) for layer in described)
    return found or "its bias has other parts than its weight, and they carry different factors"


def _low_rank(
    words: LowRankWords, derivation: Derivation
) -> tuple[list[tuple[str, tuple[Source, ...]]], list[tuple[str, str]]]:
    """Return the sources and the keys of a weight that is, or has added, a product of two leaves."""
    added = "plus." if words.base is not None else ""
    leaves = (("from", words.left), ("times", words.right))
    sources: list[tuple[str, tuple[Source, ...]]] = [
        (f"{added}{key}", (_matrix(leaf, derivation),)) for key, leaf in leaves
    ]
    keys = [("plus.einsum" if added else LOW_RANK, words.letters)]
    if words.scale != 1:
        keys.append(("plus.scale", repr(words.scale)) if added else (PRESCALED, repr(1 / words.scale)))
    return sources, keys


def _matrix(leaf: str, derivation: Derivation) -> Source:
    """Return a matrix as it is stored."""
    shape = derivation.leaves[leaf]
    axes = tuple(Axis(k, 0, size) for k, size in enumerate(shape) if size > 1)
    return Source(leaf, Layout(shape, (), axes, shape))


def _geometry(tensor: Tensor, said: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return the dimension numbers, padding, strides, ... of a convolution as text, so that equal ones are one rule."""
    source = tensor.parts[0].evidence.source
    numbers = {"dimension_numbers": source.settings.get("dimension_numbers")} if source is not None else {}
    keys = ("padding", "strides", "dilation", "groups")
    found = numbers | {k: said[k] for k in keys if k in said}
    if "padding" in said and _is_causal(tensor.shape[2:], said):
        found["padding"] = CAUSAL
    if rest := _padded_elsewhere(tensor, said):
        found[PADDED] = rest
    return tuple((key, str(value)) for key, value in found.items())


def _is_causal(kernel: Sequence[int], said: Mapping[str, Any]) -> bool:
    """Whether the source pads one axis in front, by all that the kernel covers but one."""
    if len(kernel) != 1 or said.get("transposed") or kernel[0] == 1:
        return False
    return [_numbers(pair) for pair in said["padding"]] == [((kernel[0] - 1) * int(said["dilation"][0]), 0)]


def _padded_elsewhere(tensor: Tensor, said: Mapping[str, Any]) -> list[int]:
    """Return the padding of the target's module, if the code around it pads or cuts, so that it is none that follows from the source's."""
    settings = tensor.parts[0].evidence.target.settings
    own, kernel = list(settings.get("padding") or []), tensor.shape[2:]
    names = ("padding", "strides", "dilation")
    if len(own) != len(kernel) or not all(name in said for name in names):
        return []
    pads, strides, dilation = (tuple(map(_numbers, said[name])) for name in names)
    geometry = Geometry(pads, strides, dilation)
    if said.get("transposed"):
        made = torch_transposed_padding(geometry, kernel)
        fits = (own, list(settings.get("output_padding") or [])) == (made.allowed[0], list(made.output_padding or ()))
    else:
        fits = not any(own) or own in torch_padding(geometry, kernel, SPATIAL[len(kernel)]).allowed
    return [] if fits else own


def _numbers(value: Any) -> Any:
    return tuple(map(int, value)) if isinstance(value, list | tuple) else int(value)


def _constant(tensor: Tensor) -> bool:
    return bool(tensor.parts) and all(part.arithmetic is Arithmetic.CONSTANT for part in tensor.parts)


def _of_constants(kind: str, group: Mapping[str, Tensor]) -> bool:
    """Whether a rule writes a tensor of its layer that the source lacks: zeros for the bias, or ones for the scale."""
    lacking = {role: tensor.parts[0].factor for role, tensor in group.items() if _constant(tensor)}
    has_key = kind == "linear" or kind in NORMS
    return bool(lacking) and has_key and all(factor == (role == "weight") for role, factor in lacking.items())


def _kind(module: TargetModule, tensors: Mapping[str, Tensor], said: Mapping[str, Any]) -> str:
    if module.kind_name == "attention":
        return "linear" if "weight" in tensors else "parameter"
    first = next(iter(tensors.values()))
    role, site = first.parts[0].evidence.role, first.parts[0].evidence.source
    product = role is Role.CONVOLUTION and site is not None and site.operation == "dot_general"
    if product and module.kind_name in ("conv", ""):
        return "linear"
    if module.kind_name:
        return module.kind_name
    if role in (Role.PRODUCT, Role.LOOKUP) and len(first.shape) != 2:  # blocks, experts, a number for each class
        return "parameter"
    norm = role is Role.SCALE and "epsilon" in said and "moments" not in said  # of RevIN they are over time
    if norm and len(first.shape) == 1:  # a rule for a norm has no other axes
        return "layer_norm" if "bias" in tensors else "rms_norm"
    if role is Role.CONVOLUTION and (len(first.shape) < 3 or first.parts[0].evidence.target.operand == 0):
        return "parameter"  # the code gives it the axes of space, or data is the kernel
    if role is Role.CONVOLUTION and said.get("transposed"):
        return "conv_transpose"
    return WORDS.get(role, "parameter")


def _norm_keys(
    said: Mapping[str, Any], configured: Mapping[str, Any]
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the keys of a norm, and those of its target: read off the programs, or configured in the target."""
    epsilon = said.get("epsilon", configured.get("epsilon"))
    keys = [
        ("multiplies_by", str(said.get("multiplies_by", "scale"))),
        ("epsilon", _number(epsilon) if isinstance(epsilon, float) else ASK),
    ]
    keys += [("num_groups", str(configured["num_groups"]))] if "num_groups" in configured else []
    target = [("multiplies_by", "1+weight")] if said.get("weight") == "1+weight" else []
    return tuple(keys), tuple(target)


def _number(value: float) -> str:
    """Return a number as people write it: 1e-6."""
    return re.sub(r"e-0*", "e-", f"{value:g}")


def _sources(tensor: Tensor, leaves: Mapping[str, tuple[int, ...]], *, rotary: bool) -> tuple[Source, ...] | None:
    """Return the sources of a tensor, in the order of its rows; None where an order has no name."""
    found = []
    for part in sorted(_joined(tensor.parts), key=lambda part: int(part.elements[0]) if len(part.elements) else 0):
        if not part.leaf:
            return None
        size, count = int(np.prod(tensor.shape)), len(part.elements)
        order = np.argsort(part.elements, kind="stable")
        elements = part.elements[order]
        if not np.array_equal(elements, np.arange(elements[0], elements[0] + count)):
            return None
        shape = tensor.shape
        if count != size:  # a block of rows
            row = int(np.prod(tensor.shape[1:]))
            if elements[0] % row or count % row:
                return None
            shape = (count // row, *tensor.shape[1:])
        layout = read_layout(leaves[part.leaf], part.positions[order], shape, rotary)
        if layout is None or layout.groups is None:
            return None
        found.append(Source(part.leaf, layout, part.contracted))
    return tuple(found)


def _is_part_of_leaf(tensor: Tensor, derivation: Derivation) -> bool:
    """Whether a tensor has some elements of an axis of its one leaf."""
    found = _sources(tensor, derivation.leaves, rotary=False) or ()
    return len(found) == 1 and any(axis.size < found[0].layout.leaf_shape[axis.of] for axis in found[0].layout.axes)


def _is_permuted(tensor: Tensor, derivation: Derivation) -> bool:
    """Whether the axes of a tensor's leaf lie in another order."""
    for source in _sources(tensor, derivation.leaves, rotary=False) or ():
        places = [(axis.of, axis.place) for axis in source.layout.axes]
        if places != sorted(places):
            return True
    return False


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Join parts of one leaf with the same arithmetic."""
    found: dict[Any, Part] = {}
    for part in parts:
        key = (part.leaf, part.arithmetic, part.factor, part.contracted)
        if key in found:
            first = found[key]
            elements = np.concatenate([first.elements, part.elements])
            positions = np.concatenate([first.positions, part.positions])
            found[key] = Part(
                elements, part.leaf, positions, part.arithmetic, first.evidence, part.factor, part.contracted
            )
        else:
            found[key] = part
    return list(found.values())


def _evidence(tensor: Tensor) -> str:
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
