"""Facts that the tree contradicts: by its sizes, by the leaves that it has, and by those that it lacks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convert.core.findings import Finding
from convert.layers.base import Matched, Rule
from convert.rules.file import RuleFile
from convert.rules.formula import SizeFormula


def solved_facts(rules: RuleFile, sizes: Mapping[str, int], facts: Mapping[str, Any]) -> dict[str, int]:
    """Return the facts that are the only unknown of one of the `products` or `formulas` and have one whole number that solves it.

    Where several numbers do, as of the sides of an image that have the same number of patches, the user is asked.
    """
    products = (SizeFormula(str(product), product.names, product.letter, product.at) for product in rules.products)
    formulas = (*rules.formulas, *products)
    found: dict[str, int] = {}
    while new := {x: n for formula in formulas for x, n in _solved(formula, rules, sizes, {**facts, **found})}:
        found |= new
    return found


def _solved(
    formula: SizeFormula, rules: RuleFile, sizes: Mapping[str, int], facts: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield the only unknown of a formula, with the only whole number that solves it."""
    known = {**sizes, **facts}
    unknown = [name for name in formula.names if name not in known]
    given = {name: known[name] for name in formula.names if _is_number(known.get(name))}
    size = sizes.get(formula.letter)
    if size is None or len(unknown) != 1 or unknown[0] not in rules.facts or len(given) + 1 < len(formula.names):
        return

    def value(number: int) -> float:
        return formula.value({**given, unknown[0]: number})

    try:
        number = 1 + bisect_left(range(1, size + 1), float(size), key=value)  # it grows with the number
        if [value(number + k) == size for k in (-1, 0, 1)] == [False, True, False]:
            yield unknown[0], number
    except (ArithmeticError, ValueError):  # of NaN, too
        return


def contradicted_formulas(
    rules: RuleFile, sizes: Mapping[str, int], facts: Mapping[str, Any], places: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the `formulas` of the rules, such as patches of an image, with the sizes of the tree; of a size that no leaf shows, only that it is one.

    Args:
        places: fact -> where its value is stated.
    """
    for formula in rules.formulas:
        values = {name: facts.get(name, sizes.get(name)) for name in formula.names}
        if None in values.values():
            continue
        try:
            found = formula.value({name: value for name, value in values.items() if _is_number(value)})
        except (ArithmeticError, KeyError, ValueError):
            found = None
        size = sizes.get(formula.letter)
        fits = found == size if size is not None else found is not None and found >= 1 and found % 1 == 0
        if not fits:
            of_facts = [name for name in values if name in facts]
            meaning = f" ({rules.axes[formula.letter].meaning})" if formula.letter in rules.axes else ""
            yield Finding(
                "size-conflict",
                f"the tree has {formula.letter} = {size}{meaning}"
                if size is not None
                else f"the sizes give no {formula.letter}{meaning}",
                rule=formula.at.line_only,
                path=" ".join(dict.fromkeys(places[name] for name in of_facts if places[name] != rules.path)),
                expected=f"{formula.text} to be {'a whole number' if size is None else size}",
                got=("" if found is None else f"{found:g} with ")
                + "; ".join(f"{k} = {v!r}" for k, v in values.items()),
                fix=f"give the {' and '.join(of_facts)} of the model that was trained"
                if of_facts
                else "convert a tree whose leaves fit one another",
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def odd_heads(rules: RuleFile, matched: Sequence[Matched], sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Find heads of which RoPE cannot turn pairs of features: one finding for each letter."""
    seen = set()
    for found in matched:
        leaf = next((leaf for of_role in found.leaves.values() for leaf in of_role.values()), None)
        letter = found.rule.rope.axis if found.rule.rope is not None else ""
        if leaf is None or letter in seen or sizes.get(letter, 0) % 2 == 0:
            continue
        seen.add(letter)
        meaning = f" ({rules.axes[letter].meaning})" if letter in rules.axes else ""
        yield Finding(
            "size-conflict",
            "RoPE turns pairs of features of a head",
            rule=found.rule.at.line_only,
            path=leaf,
            expected=f"an even {letter}{meaning}",
            got=f"{letter} = {sizes[letter]}",
            fix="convert a tree whose leaves fit one another, or correct `rope` in rules of your own",
        )


def contradicted_by_leaves(
    matched: Sequence[Matched], facts: Mapping[str, Any], places: Mapping[str, str]
) -> Iterator[Finding]:
    """Find facts with a value that no tree with these leaves has: one finding for each fact."""
    seen = set()
    for found in matched:
        leaf = next((leaf for of_role in found.leaves.values() for leaf in of_role.values()), None)
        for name, allowed in found.rule.fact_values.items():
            if leaf is None or name not in facts or facts[name] in allowed or name in seen:
                continue
            seen.add(name)
            expected = f"one of {', '.join(map(str, allowed))}"
            yield _other_value(found.rule, f"the tree has {leaf}", name, expected, facts[name], places)


def _other_value(rule: Rule, problem: str, name: str, expected: str, value: Any, places: Mapping[str, str]) -> Finding:
    """Report a fact whose value the leaves of a rule contradict."""
    return Finding(
        "setting-invalid",
        problem,
        rule=rule.at.line_only,
        path=places.get(name, ""),
        expected=f"{name} to be {expected}",
        got=repr(value),
        fix=f"give the {name} of the model that was trained",
    )


def layers_without_leaves(
    matched: Sequence[Matched], counts: Mapping[str, int], facts: Mapping[str, Any], places: Mapping[str, str]
) -> Iterator[Finding]:
    """Find leaves that are absent in layers before those that `optional_last` counts, and leaves in some of those that it counts.

    A tree has the unused leaves of all these layers, or of none.
    """
    for found in matched:
        fact = found.rule.optional_last
        if fact is None or len(found.rule.path.indices) != 1:
            continue
        (index,) = found.rule.path.indices
        layers = counts.get(index, 0)
        present = {values[0] for values in found.indices}
        count = facts.get(fact)
        without = layers - len(present)
        if isinstance(count, int) and 0 < without < count <= layers and present == {*range(layers - without)}:
            problem = f"the last {without} of {layers} layers have no {found.rule.path}, and those before have it"
            yield _other_value(found.rule, problem, fact, str(without), count, places)
            continue
        needed = layers - count if isinstance(count, int) else max(present, default=-1) + 1
        missing = [layer for layer in range(needed) if layer not in present]
        if missing:
            others = f", nor are those of {len(missing) - 1} more layers" if len(missing) > 1 else ""
            yield Finding(
                "leaf-missing",
                f"this leaf is not in the checkpoint{others}; the target's tensor has no source",
                rule=found.rule.at.line_only,
                path=found.rule.path.fill({index: missing[0]}),
                expected=f"it in layers 0 to {needed - 1}: only the last layers may be without it"
                + (f", {fact} = {count} of {layers}" if isinstance(count, int) else ""),
                got=f"layers {', '.join(map(str, sorted(present)))}" if present else "none",
                fix=f"the checkpoint is incomplete, or {fact} is another number",
            )
