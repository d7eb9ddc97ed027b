"""Facts: hyperparameters that no leaf holds, from the rules, the published size, the sidecar and the settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from convert.core.findings import Finding
from convert.planning.facts.settings import as_declared
from convert.planning.facts.sidecar import Sidecar, place_in_sidecar, sidecar_facts
from convert.rules.file import ASK, RuleFile, Version, references


def published_version(rules: RuleFile, sizes: Mapping[str, int]) -> Version | None:
    """Return the published version with these sizes."""
    return next((v for v in rules.versions if all(sizes.get(name) == size for name, size in v.sizes.items())), None)


def collect_facts(
    rules: RuleFile, version: Version | None, sidecar: Sidecar, sizes: Mapping[str, int], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the known facts; settings take precedence over the sidecar, the published version and the rules."""
    given = {key: value for key, value in settings.items() if key in rules.facts}
    facts = {**rules.facts, **(version.facts if version else {}), **sidecar_facts(rules, sidecar), **given}
    return {key: as_declared(rules, key, expand_fact(value, sizes)) for key, value in facts.items() if value != ASK}


def expand_fact(value: Any, sizes: Mapping[str, int]) -> Any:
    """Expand a list as long as a size, ``{repeat: [a, a, b], length: $i}``; return other facts unchanged."""
    if isinstance(value, dict) and set(value) == {"repeat", "length"} and isinstance(value["repeat"], list):
        length = sizes.get(str(value["length"]).removeprefix("$"))
        if length is not None:
            return [value["repeat"][k % len(value["repeat"])] for k in range(length)]
    return value


def unmet_requirements(
    rules: RuleFile, target: str, facts: Mapping[str, Any], sizes: Mapping[str, int]
) -> Iterator[Finding]:
    """Find facts that differ from the only value that the target's code supports."""
    code = rules.targets[target]
    for name, need in code.requires.items():
        supported = expand_fact(need.value, sizes)
        if name in facts and facts[name] != supported:
            others = [other for other in rules.targets if other != target]
            yield Finding(
                "target-requirement",
                f"{code.loads} supports only one {name} ({need.because})",
                rule=need.at.line_only,
                expected=f"{name} = {supported}",
                got=f"{name} = {facts[name]}",
                fix=f"choose another target: --to {' or '.join(others)}"
                if others
                else "use other code to load the model",
            )


def unfit_sizes(rules: RuleFile, target: str, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Find sizes that the target's code does not take, as they are no multiple of another one."""
    code = rules.targets[target]
    for letter, need in code.multiples.items():
        if letter not in sizes or need.of not in sizes:
            continue
        if sizes[need.of] and sizes[letter] % sizes[need.of] == 0:
            continue
        others = [other for other in rules.targets if other != target]
        yield Finding(
            "target-requirement",
            f"{code.loads} does not take these sizes ({need.because})",
            rule=need.at.line_only,
            expected=f"{letter} ({rules.axes[letter].meaning}) to be a multiple of {need.of} = {sizes[need.of]} "
            f"({rules.axes[need.of].meaning})",
            got=f"{letter} = {sizes[letter]}",
            fix=f"choose another target: --to {' or '.join(others)}" if others else "use other code to load the model",
        )


def unknown_requirements(rules: RuleFile, target: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Name facts that the target's code requires and that are unknown."""
    code = rules.targets[target]
    for name, need in code.requires.items():
        if name not in facts:
            yield f"{code.loads} computes with {name} = {need.value}, and the tree does not show it: {need.because}"


def solve_products(
    rules: RuleFile,
    sizes: Mapping[str, int],
    facts: Mapping[str, Any],
    sidecar: Sidecar,
    settings: Mapping[str, Any],
) -> tuple[dict[str, int], list[Finding]]:
    """Compare the `products` of the rules, such as heads times their width, with the sizes of the tree.

    Returns:
        The sizes, with those of letters that a product determines; and what the tree contradicts.
    """
    found, reasons = dict(sizes), {name: f"{name} = {size}" for name, size in sizes.items()}
    findings: list[Finding] = []
    for product in rules.products:
        values = {name: facts[name] for name in product.names if name in facts}
        values |= {name: found[name] for name in product.names if name in found}
        unknown = set(product.names).difference(values)
        if len(unknown) > 1 or unknown & set(rules.facts) or (unknown and product.letter not in found):
            continue
        positive = all(isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in values.values())
        rest = math.prod(values.get(str(x), x) for x in product.factors if x not in unknown) if positive else 0
        if product.letter not in found:
            found |= {product.letter: int(rest)} if rest else {}
            reasons[product.letter] = f"{product.letter} = {rest}, by {product}"
            continue
        size = found[product.letter]
        if positive and unknown and size % rest == 0:
            (letter,) = unknown
            found[letter] = int(size // rest)
            reasons[letter] = f"{letter} = {found[letter]}, by {product} = {product.letter} = {size}"
        elif not positive or unknown or rest != size:
            stated = [f"{name} = {value!r}" for name, value in values.items() if name in facts]
            stated += [reasons[name] for name in values if name in found]
            meaning = f" ({rules.axes[product.letter].meaning})" if product.letter in rules.axes else ""
            findings.append(
                Finding(
                    "size-conflict",
                    f"the tree has {product.letter} = {size}{meaning}",
                    path=_place_of(rules, [name for name in values if name in facts], sidecar, settings),
                    expected=f"{product} to be {size}"
                    if positive and not unknown
                    else f"{', '.join(values)} to be a positive integer that divides {size}",
                    got="; ".join(stated),
                    fix="one of the two is of another checkpoint",
                )
            )
    return found, findings


def asked_for_sizes(
    rules: RuleFile, target: str, sizes: Mapping[str, int], facts: Mapping[str, Any], settings: Mapping[str, Any]
) -> Finding | None:
    """Name the facts that the user must give, as `products` say that they are sizes which no leaf shows, with those of config.json."""
    asked: dict[str, str] = {}
    for product in rules.products:
        open_letters = [x for x in (product.letter, *product.names) if x in rules.axes and x not in sizes]
        unknown = [name for name in product.names if name in rules.facts and name not in facts]
        asked |= dict.fromkeys(unknown, rules.axes[open_letters[0]].meaning) if open_letters else {}
    if not asked:
        return None
    shown = ", ".join(f"{name} ({meaning})" for name, meaning in asked.items())
    config = dict.fromkeys(references(rules.targets[target].config))
    further = [name for name in config if name in rules.facts and name not in facts and name not in asked]
    return missing_facts(
        rules,
        f"{rules.model} needs {shown}",
        list(asked),
        sizes,
        settings,
        f", and for config.json {', '.join(further)}" if further else "",
    )


def missing_facts(
    rules: RuleFile,
    needed: str,
    facts: Sequence[str],
    sizes: Mapping[str, int],
    settings: Mapping[str, Any],
    further: str,
) -> Finding:
    """Return the finding for facts that no leaf, no published size and no setting gives.

    Args:
        needed: what needs which of them.
        facts: their names.
        further: what else may be done, or must be given.
    """
    published = "; ".join(
        f"{version.name} has {', '.join(f'{k}={v}' for k, v in version.sizes.items())}" for version in rules.versions
    )
    truncated = truncation_note(rules, sizes, settings)
    options = " ".join(f"--set {name}=..." for name in facts)
    sidecar = f"put {rules.sidecar.file} next to the checkpoint, or " if rules.sidecar else ""
    return Finding(
        "fact-missing",
        f"{needed}, which the tree does not hold"
        + (f", and this is no published size ({published})" if published else "")
        + (f"; {truncated}" if truncated else ""),
        rule=rules.path,
        fix=f"{sidecar}give {'it' if len(facts) == 1 else 'them'} with {options}{further}",
        data={"facts": list(facts)},
    )


def stated_places(
    rules: RuleFile, facts: Mapping[str, Any], sidecar: Sidecar, settings: Mapping[str, Any]
) -> dict[str, str]:
    """Map each fact to the place where its value is stated."""
    return {name: _place_of(rules, [name], sidecar, settings) for name in facts}


def _place_of(rules: RuleFile, names: Sequence[str], sidecar: Sidecar, settings: Mapping[str, Any]) -> str:
    """Return where the value of a fact is stated."""
    for name in names:
        if name in settings:
            return f"--set {name}={settings[name]}"
    stated = next((name for name in names if sidecar.config.get(name) is not None), None)
    return place_in_sidecar(rules, sidecar, stated) if rules.sidecar is not None and stated else rules.path


def truncation_note(rules: RuleFile, sizes: Mapping[str, int], settings: Mapping[str, Any]) -> str:
    """Warn of a tree that differs from a published size only in the number of layers; empty for other trees.

    A truncated stack of layers looks like that. A number that the user sets (``--set i=17``) is intended.
    """
    counted = {
        index for rule in rules.rules if rule.sources for index in (*rule.path.indices, *rule.stacked, *rule.index_from)
    }
    for version in rules.versions:
        differs = [name for name, size in version.sizes.items() if sizes.get(name) != size]
        if len(differs) == 1 and differs[0] in counted and differs[0] in sizes and differs[0] not in settings:
            (name,) = differs
            meaning = rules.axes[name].meaning if name in rules.axes else name
            return (
                f"the tree has {sizes[name]} {meaning} and otherwise the sizes of {version.name}, which has "
                f"{version.sizes[name]}: it may be truncated; --set {name}={sizes[name]} confirms the number"
            )
    return ""


def missing_sidecar_note(rules: RuleFile, sidecar: Sidecar, settings: Mapping[str, Any]) -> Iterator[str]:
    """Say which facts are assumed because there is no sidecar, or nothing in it."""
    if rules.sidecar is not None and not rules.sidecar.is_gin and not sidecar.config:
        facts = ((key, value) for key, value in rules.facts.items() if value != ASK and key not in settings)
        if assumed := ", ".join(f"{key} {value}" for key, value in facts):
            file = rules.sidecar.file
            found = f"the {file} next to the checkpoint states no setting" if sidecar.exists else f"there is no {file} next to the checkpoint"  # fmt: skip
            yield f"{found}; the rules assume {assumed}"
