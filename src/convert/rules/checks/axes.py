"""Checks of the axes that a rule names: parts of an axis, the axes of a target, and what needs the size of an axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from convert.core.axis_groups import AxisGroup
from convert.core.yaml_nodes import Position
from convert.layers import Rule, TargetLayer
from convert.rules.file import RuleFile, references

OTHER_ORDER = (
    "; for parts in another order give the axis one letter, and say both orders with `concatenated`, such as {D: A + B}"
)


def check_parts(rule: Rule, layer: TargetLayer) -> None:
    """Check that a key which applies to a whole weight is not given for a weight of several parts.

    Raises:
        ValueError: it is.
    """
    grouped = any(rule.kind.axis_groups(variant) for variant in rule.kind.variants or (None,))
    if grouped and rule.normalized is not None:
        raise ValueError(
            f"`{rule.normalized.role}` is computed over axes as stored; write the einsum with one letter for each"
        )
    factor, count = rule.prescaled_by, rule.kind.parts
    if factor is None or (factor.parts is None and not count):
        return
    if factor.parts is None:
        raise ValueError(f"`prescaled_by` would apply to all parts of the leaf; name those that have the factor, such as `prescaled_by: {{{factor.text}: [1]}}`")  # fmt: skip
    if max(factor.parts) >= count:
        raise ValueError(f"`prescaled_by` names part {max(factor.parts) + 1}, and the leaf has {count or 'no parts; write the factor alone'}")  # fmt: skip
    if len(layer.path.groups) == len(rule.path.groups) and layer.rows is None:
        raise ValueError(f"{layer.path} has all parts of the leaf, and `prescaled_by` is for some; name one target for each part, or give the target `axes`")  # fmt: skip


def check_target_axes(rule: Rule, layer: TargetLayer) -> None:
    """Check that the target's `axes` are those of the leaf.

    Raises:
        ValueError: they are not, or the target is one that has no such axes.
    """
    if layer.axes is None:
        return
    if layer.rows is not None:
        _check_rows(rule, layer, layer.rows)
        return
    named = "".join(layer.axes)
    split = "".join(rule.split_axes(layer))
    member = len(layer.path.groups) > len(rule.path.groups)
    parts = [rule.kind.part(k) for k in range(rule.kind.parts)]
    kept = layer.parametrization is not None and rule.normalized is not None
    if layer.computes is not None or kept or (parts and not member) or len(layer.path.groups) < len(rule.path.groups):  # fmt: skip
        raise ValueError("a target with `axes:` holds one leaf, one part of a sum, or one element of an axis; it is not fused, and has no `einsum`, `dimension_numbers` or scale of a weight norm")  # fmt: skip
    for letters, outputs in [axes for kind in parts or [rule.kind] for axes in kind.weight_axes] or [("", "")]:
        own = [x for x in letters if x not in split and not (member and not parts and x == outputs[0])]
        unknown = [x for x in named if x not in own]
        if unknown:
            raise ValueError(f"the target's `axes` name {unknown[0]}, and the leaf has the axes {' '.join(own) or '(unnamed; give the rule `axes`)'}")  # fmt: skip
        lost = [x for x in own if x not in named]
        if lost and not rule.kind.unit_axes:
            raise ValueError(f"the target's `axes` leave out {', '.join(lost)} of the leaf")


def _check_rows(rule: Rule, layer: TargetLayer, rows: AxisGroup) -> None:
    """Check that the rows of a target have the parts that the rule makes, and that each has the letters of its leaf.

    Raises:
        ValueError: they do not.
    """
    if layer.along is not None and not (rule.kind.fuses and layer.along == 0):
        _check_columns(rule, layer, rows, layer.along)
        return
    if rule.kind_name != "linear" or layer.computes is not None or layer.parametrization is not None or rule.normalized is not None or rule.flattened is not None:  # fmt: skip
        raise ValueError(f"{rows} of the target's first axis is a sum; that is for a `linear` target, without `einsum`, `flattened` or a norm of the weight")  # fmt: skip
    kinds = [rule.kind.part(k) for k in range(rule.kind.parts)] or [rule.kind]
    leaves = len(rule.path.groups[-1].words) if len(layer.path.groups) < len(rule.path.groups) else 1
    made = layer.part[1] if layer.part else len(kinds) * leaves
    if (layer.part and len(kinds) * leaves > 1) or len(layer.path.groups) > len(rule.path.groups) or (leaves > 1 and len(kinds) > 1):  # fmt: skip
        raise ValueError(f"{rows} of the target's `axes` takes its parts from several leaves, from a sum in the equation, or from rules with `part`; write one of them")  # fmt: skip
    if made != len(rows.parts):
        raise ValueError(f"{rows} of the target's `axes` has {len(rows.parts)} parts, and the rule makes {made}")
    rest = "".join((layer.axes or ())[1:])
    for k in [layer.part[0] - 1] if layer.part else range(made):
        for letters, outputs in kinds[k if len(kinds) > 1 else 0].weight_axes:
            inputs = [x for x in letters if x not in outputs]
            if set(rows.terms[k]) != set(outputs) or set(rest) != set(inputs):
                raise ValueError(
                    f"part {k + 1} of the target's `axes` has the letters {' '.join(rows.terms[k])}, and {' '.join(rest)}; the leaf has the "
                    f"output axes {' '.join(outputs)}, and the input axes {' '.join(inputs)}"
                    + (OTHER_ORDER if kinds[0] is not rule.kind else "")
                )


def _check_columns(rule: Rule, layer: TargetLayer, columns: AxisGroup, along: int) -> None:
    """Check that the leaves of a rule are the parts of an axis of a target that is no matrix of a linear layer.

    Raises:
        ValueError: they are not.
    """
    if rule.kind_name != "parameter" or rule.kind.parts:
        raise ValueError(f"{columns} of the target's axes is a sum; that is for a `parameter` whose leaves have no sum themselves{OTHER_ORDER}")  # fmt: skip
    if columns.before and (along != -1 or any(columns.parts) or columns.after):
        raise ValueError(f"{columns} of the target's axes: elements of leaves alternate one by one along the last axis, as in (F (1 + 1)), or leaves follow each other, as in (F + F)")  # fmt: skip
    leaves = len(rule.path.groups[-1].words) if len(layer.path.groups) < len(rule.path.groups) else 1
    if (layer.part[1] if layer.part and leaves == 1 else leaves) != len(columns.parts):
        raise ValueError(f"{columns} of the target's axes has {len(columns.parts)} parts, and the rule has {leaves} for it: list them in `from`, as {{a,b}}")  # fmt: skip
    for letters, _ in rule.kind.weight_axes or [("", "")]:
        for term in columns.terms if layer.part is None else columns.terms[layer.part[0] - 1 : layer.part[0]]:
            axes = list(layer.axes or ())
            axes[along] = term
            made = "".join(axes)
            if sorted(made) != sorted(letters):
                raise ValueError(f"the target's `axes` have the letters {' '.join(made)} for a part, and the leaf has {' '.join(letters) or 'unnamed axes; give the rule `axes`'}")  # fmt: skip


def users_of_sizes(rules: RuleFile) -> Iterator[tuple[Position, str, Iterable[object]]]:
    """Yield each key that needs the sizes of axes: its position, its description, and the letters."""
    for name, axis in rules.axes.items():
        yield axis.at, f"`equals` of {name}", (*axis.equals, *([name] if axis.equals else []))
        yield axis.at, f"`divides` of {name}", (axis.divides, name) if axis.divides else ()
    for rule in rules.rules:
        for user, names in _users_in_rule(rule):
            yield rule.at, user, names
    header = rules.node.value
    for target in rules.targets.values():
        at = header["targets"].value[target.name].at
        yield at, "`config`", [*references(target.config), *references(target.generation)]
    for version in rules.versions:
        yield header["versions"].value[version.name].at, f"version {version.name}", version.sizes
    for product in rules.products:
        yield product.at, "`products`", (product.letter, *product.factors)
    for formula in rules.formulas:
        yield formula.at, "`formulas`", (formula.letter, *formula.names)
    for size in rules.sidecar.sizes if rules.sidecar is not None else ():
        if size.text not in rules.axes:  # a letter alone may be compared with a list of the file, layer by layer
            yield size.at, "`sizes`", size.names


def _users_in_rule(rule: Rule) -> Iterator[tuple[str, Iterable[object]]]:
    if rule.prescaled_by is not None:
        yield "`prescaled_by`", [rule.prescaled_by.of]
    yield "`same_size`", [*rule.same_size, *rule.same_size.values()]
    if rule.rope is not None:
        yield "`rope`", [rule.rope.axis, *rule.rope.leaf_axes]
    if rule.flattened is not None:
        yield "`flattened`", [rule.flattened.axis, *rule.flattened.order]
    for axis, parts in rule.concatenated.items():
        yield "`concatenated`", [axis, *"".join(parts.parts)]
    for _, layer in rule.layers:
        if layer.rows is not None:
            yield "the target's `axes`", "".join(layer.rows.terms)
    if (pair := rule.kind.pair) is not None:
        yield "a low-rank product", [*pair.product.first, *pair.product.second]
    if rule.normalized is not None:
        yield f"`{rule.normalized.role}`", rule.kind.letters_used
    for variant in rule.kind.variants or (None,):
        for group in rule.kind.axis_groups(variant).values():
            yield "a composite axis", "".join(group.terms)
    if not rule.asked:
        yield "the target's path", [axis for _, layer in rule.layers for axis in rule.split_axes(layer)]
    yield "`strides`", rule.kind.sizes_named
