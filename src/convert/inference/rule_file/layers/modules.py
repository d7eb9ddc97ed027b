"""Say what every module of the target is: a rule for each layer, and the tensors that no rule makes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convert.drafting.like.target import TargetModel, TargetModule, join
from convert.inference.derivation import Derivation, Fact, Grade, Role, Tensor
from convert.inference.rule_file.layers.cells import KINDS, layers_of, name_cell, of_stack
from convert.inference.rule_file.layers.described import Facts
from convert.inference.rule_file.layers.fused import alternating, in_columns, side_by_side
from convert.inference.rule_file.layers.keys import evidence_of
from convert.inference.rule_file.layers.layout import Axis, Layout
from convert.inference.rule_file.layers.opened import as_stored, with_opened_axes
from convert.inference.rule_file.layers.parametrized import is_norm_of_rows, with_parametrizations
from convert.inference.rule_file.layers.rule import ATTENTION, NORMS, PARAMETERS, LayerRule, NoWordsError, Source
from convert.inference.rule_file.layers.tensors import NO_CONSTANT, describe_tensors
from convert.inference.rule_file.layers.ways import ROLES
from convert.layers.weight_keys import PARAMETRIZATIONS

NO_CELL = "no cell of the rule language gives these tensors"
PATTERN = {"{", "}", "*"}  # of paths in rules
IN_PATTERNS = "its name has a brace or a star, which a rule reads as a pattern; give the module another name"
COUNTER = "num_batches_tracked"  # of a batch norm: its rule writes it
STATISTICS = {"running_mean", "running_var"}
UNSURE = (Grade.OPEN, Grade.BEHIND, Grade.IN_FRONT)
PARAMETRIZED_ROLES = {name: role for by_role in PARAMETRIZATIONS.values() for role, name in by_role.items()}


@dataclass(frozen=True)
class Layers:
    """The rules of all modules, one each.

    Attributes:
        found: the rules.
        open: tensors that no rule makes, with the reason.
        lacking: tensors of one number, which the source does without and no rule writes.
    """

    found: tuple[LayerRule, ...]
    open: Mapping[str, str]
    lacking: Collection[str] = ()


def describe_layers(derivation: Derivation, target: TargetModel, as_parameters: Collection[str] = ()) -> Layers:
    """Describe every module of the target that has tensors; those of which one is named as parameters, if they are no cells."""
    derivation, opened = with_opened_axes(derivation)
    facts = _facts_of(derivation.facts)
    found: list[LayerRule] = []
    unknown: dict[str, str] = {}
    known = {name: tensor for tensor in derivation.tensors for name in (tensor.name, *tensor.also)}
    done: set[str] = set()
    for module in with_parametrizations(target):
        if module.kind_name in KINDS:
            cells, lost = _cells(module, known, facts, derivation)
            found += cells
            unknown |= lost
            continue
        own = {
            last: known[full]
            for last in module.tensors
            if (full := join(module.name, last)) in known and known[full].name not in done and not known[full].is_own
        }
        if PATTERN & set(module.name):
            unknown |= dict.fromkeys((tensor.name for tensor in own.values()), IN_PATTERNS)
            continue
        if not module.kind_name and (statistics := STATISTICS & own.keys()):  # a batch norm of the target's own code
            counts = statistics == STATISTICS and COUNTER in module.tensors
            module = replace(module, kind_name="batch_norm" if counts else "parameter")
        root = not module.name and module.kind_name != ATTENTION  # a rule for a layer needs the name of its module
        alone = module.kind_name == "linear" and set(own) == {"bias"}  # the weight is tied to a table
        if (
            root
            or alone
            or any(tensor.name in as_parameters for tensor in own.values())
            or not is_norm_of_rows(own)
            or any(side_by_side(tensor) or in_columns(tensor) or alternating(tensor) for tensor in own.values())
            or (module.kind_name != "linear" and any(p.leaf in opened for tensor in own.values() for p in tensor.parts))
        ):
            module = replace(module, kind_name="parameter")  # a rule for a layer has no words for it
        for kind_name, group in _groups(module, own):
            done |= {tensor.name for tensor in group.values()}
            try:
                rules = describe_tensors(replace(module, kind_name=kind_name), group, facts, derivation)
            except NoWordsError as error:
                rules, lost = _one_by_one(module, group, facts, derivation, str(error))
                found += rules
                unknown |= lost
                continue
            found += rules
            if not any(key == PARAMETERS for rule in rules for key, _ in rule.target_keys):
                unknown |= {tensor.name: NO_CONSTANT for tensor in group.values() if tensor.is_constant}
    lacking = {name for name in unknown if known[name].is_constant and known[name].grade not in UNSURE}
    stored = tuple(as_stored(rule, opened) for rule in found)
    return Layers(stored, {name: why for name, why in unknown.items() if name not in lacking}, lacking)


def _one_by_one(
    module: TargetModule, group: Mapping[str, Tensor], facts: Facts, derivation: Derivation, why: str
) -> tuple[list[LayerRule], dict[str, str]]:
    """Return the rules of the weight and of the bias of a layer for which one rule has no words, and the tensors without one."""
    known = all(tensor.grade not in UNSURE and not tensor.is_constant for tensor in group.values())
    if not known or set(group) != {"weight", "bias"} or module.kind_name in NORMS:
        return [], {tensor.name: why for tensor in group.values()}
    found: list[LayerRule] = []
    lost: dict[str, str] = {}
    for role, kind_name in (("weight", module.kind_name), ("bias", "parameter")):
        alone = replace(module, kind_name=kind_name)
        try:
            found += describe_tensors(alone, {"weight": group[role]}, facts, derivation)
        except NoWordsError:
            lost[group[role].name] = why
    return found, lost


def _cells(
    module: TargetModule, known: Mapping[str, Tensor], facts: Facts, derivation: Derivation
) -> tuple[list[LayerRule], dict[str, str]]:
    """Return the rules of a recurrent module, one for each layer and direction, and the tensors without one.

    Where no cell gives the tensors, as those of torch's `proj_size`, each has a rule of its own.
    """
    found: list[LayerRule] = []
    unknown: dict[str, str] = {}
    layers = layers_of(list(module.tensors))
    of_cells = {name for names in layers.values() for name in names}
    alone = [
        known[full] for name in module.tensors if name not in of_cells and (full := join(module.name, name)) in known
    ]
    for suffix, names in layers.items():
        tensors = {
            name.removesuffix(f"_{suffix}" if suffix else ""): known[full]
            for name in names
            if (full := join(module.name, name)) in known
        }
        complete = len(tensors) == len(names) and all(tensor.parts for tensor in tensors.values())
        stack: tuple[tuple[int, int], ...] = ()  # how many cells, and the number of this one
        cell = name_cell(module.kind_name, tensors, derivation.leaves, module.facts) if complete else None
        if cell is None and complete and (one := of_stack(tensors, derivation.leaves)) is not None:
            cell = name_cell(module.kind_name, one.tensors, one.shapes, module.facts)
            stack = ((one.count, one.number),)
        if cell is None:
            unknown |= {} if complete else {tensor.name: tensor.lack for tensor in tensors.values()}
            alone += tensors.values() if complete else ()
            continue
        width = sum(length for _, length in cell.inputs)
        # no leaf's axis, but that of the cell's input
        inputs = (Axis(len(stack), 0, width, parts=cell.inputs),) if cell.inputs else ()
        shape, fixed = (*(count for count, _ in stack), width), tuple((0, number) for _, number in stack)
        source = Source(cell.start, Layout(shape, fixed, inputs, ()))
        weakest = max((tensor.grade for tensor in tensors.values()), key=list(Grade).index)
        layer = suffix.removesuffix("_reverse")
        keys: tuple[tuple[str, str], ...] = (("direction", "backward"),) if layer != suffix else ()
        keys += () if "bias_ih" in tensors else (("bias", "false"),)
        leaves = tuple(dict.fromkeys(p.leaf for tensor in tensors.values() for p in tensor.parts if p.leaf))
        evidence = evidence_of(tensors["weight_ih"])
        place = f"{module.name}.{layer}"
        found.append(
            LayerRule(
                module.kind_name, place, (("from", (source,)),), (), cell.keys, keys, (), evidence, weakest, leaves
            )
        )
    as_parameter = replace(module, kind_name="parameter")
    for tensor in alone:
        try:
            found += describe_tensors(as_parameter, {"weight": tensor}, facts, derivation)
        except NoWordsError:
            unknown[tensor.name] = NO_CONSTANT if tensor.is_constant else NO_CELL if tensor.parts else tensor.lack
    return found, unknown


def _facts_of(facts: Sequence[Fact]) -> Facts:
    """Return the facts by the tensors that they belong to."""
    found: dict[str, dict[str, Any]] = {}
    for fact in facts:
        for tensor in fact.tensors:
            found.setdefault(tensor, {})[fact.name] = fact.value
    return found


def _groups(module: TargetModule, own: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the tensors of a module that one rule makes, by their role, with the kind of layer."""
    kind = module.kind_name
    if kind == ATTENTION:
        for weight, bias in (("in_proj_weight", "in_proj_bias"), ("out_proj.weight", "out_proj.bias")):
            yield kind, {role: own[name] for role, name in (("weight", weight), ("bias", bias)) if name in own}
        rest = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        yield from ((kind, {name: own[name]}) for name in own if name not in rest)
    elif kind != "parameter" and (kind or set(own) <= {*ROLES, *PARAMETRIZED_ROLES}):
        kept = {name: tensor for name, tensor in own.items() if name != COUNTER}
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
