"""Compare the facts of a plan with what does not come from the rules, ``--set`` or the header of the file under test.

Where the JAX model of a reference is built from the facts of the plan, a wrong fact is on both sides, and no level sees it. A
fact is confirmed by the config.json next to the checkpoint, by a recording, by the tree, by the values that upstream published,
or by a target whose code has the value as a constant. All others are listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from convert.core.errors import OptionError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.tensor_spec import TensorSpec
from convert.planning.facts.sidecar import place_in_sidecar, sidecar_facts
from convert.planning.plan import Plan
from convert.references.published import Every, OneOf, Published, published
from convert.rules.file import references
from convert.rules.names_used import facts_of
from convert.verify.config.declared import DeclaredFact, declared_facts, origin_in_rules
from convert.verify.config.hf_config import flatten, harmless
from convert.verify.config.same_value import same
from convert.verify.report.facts import OUTPUTS_AGREE, JudgedFact, Status, shown
from convert.verify.report.report import LevelReport, Verdict

RECORDED = "the recording "
ACTIVATION = "no level of the check shows it: compare the code of the two models"
WORD_ALONE = "nothing to do for the file: the model level shows that both models compute the same behind the layer, and no tensor depends on this word of the rule, which is not compared with their code"
BY_HAND = {  # `JudgedFact.next` -> what a person compares
    "": "compare them with the training configuration",
    ACTIVATION: ACTIVATION,
    WORD_ALONE: "compare the activation of the rule with the code of the two models",
}
UNSEEN = ":"  # in the names of what the models level does not show, which are known when it ran: ``inputs:tokens``


def judge(
    plan: Plan,
    stated: Mapping[str, Mapping[str, Any]],
    *,
    read: Collection[str] = (),
    constants: Collection[str] = (),
    trust: Collection[str] = (),
    models_agree: bool = False,
) -> tuple[JudgedFact, ...]:
    """Say of each fact and setting of the plan what confirms or contradicts it.

    Args:
        stated: who states settings -> the settings; the first that names a setting is the one that was used. Recordings start
            with `RECORDED`.
        read: facts from which the reference builds its models.
        constants: facts that the code of the target has as constants, with the same value.
        trust: facts that ``--trust`` names.
        models_agree: whether the model level passed. This confirms a factor of the weights that the reference does not read.

    Raises:
        OptionError: `trust` names a fact that the plan does not have.
    """
    names = require_names(trust, plan)
    needed = {*_deciding(plan), *read, *_other_settings(plan)}
    compared = _factors(plan) - {*read} if models_agree else set()
    facts = []
    for name in names:
        value = plan.facts[name] if name in plan.facts else plan.settings[name]
        status, evidence = _evidence(plan, stated, name, value, constants)
        if status is Status.UNVERIFIED and name in compared:
            status, evidence = Status.VERIFIED, "the comparison of the models: the JAX side does not read it"
        if name in trust and status is not Status.VERIFIED:
            status = Status.TRUSTED
        facts.append(JudgedFact(name, value, _origin(plan, stated, name), status, evidence, name in needed))
    return tuple(facts)


def of_layers(unread: Iterable[DeclaredFact], *, models_agree: bool = False) -> tuple[JudgedFact, ...]:
    """Return the facts of layers that could not be read from the target, those of one value as one.

    Args:
        models_agree: whether the model level passed. Then the target computes what the JAX model does, and such a fact describes the source alone;
            of an activation the word of the rule may still be another one than both compute.
    """
    groups: dict[tuple[str, str], list[DeclaredFact]] = {}
    for fact in unread:
        if fact.layer is not None:  # `judge` has those of the whole model
            groups.setdefault((fact.name, shown(fact.value)), []).append(fact)
    judged = []
    for facts in groups.values():
        first, more = facts[0], f" and {len(facts) - 1} more" if len(facts) > 1 else ""
        layers = (first.layer.text if first.layer else "") + more
        decides = first.name == "activation" and first.value != "none"  # a rule without the key says no more
        following = (WORD_ALONE if decides else OUTPUTS_AGREE) if models_agree else ACTIVATION if decides else ""
        judged.append(
            JudgedFact(first.name, first.value, first.at, Status.UNVERIFIED, "", decides, layers, next=following)
        )
    return tuple(judged)


def of_names(plan: Plan) -> tuple[JudgedFact, ...]:
    """Return that a list of the user names leaves of equal shapes: both models take them by these names."""
    source = plan.checkpoint
    used = {part.leaf for step in plan.steps for part in step.parts}
    groups: dict[TensorSpec, list[str]] = {}
    for name, leaf in source.leaves.items():
        if name in used:
            groups.setdefault(leaf.spec, []).append(name)
    alternatives = [names for names in groups.values() if len(names) > 1]
    if not source.names_from or not alternatives:
        return ()
    first, count = alternatives[0], sum(map(len, alternatives))
    value = f"the order of {first[0]}, {first[1]}" + (f" and {count - 2} more" if count > 2 else "")
    following = "they have equal shapes, and the checkpoint has no names: make the skeleton with the code that saved it; if it was, add --trust names:leaves"
    return (JudgedFact("names:leaves", value, source.names_from, Status.UNVERIFIED, next=following),)


def trusted(facts: Iterable[JudgedFact], trust: Collection[str]) -> tuple[JudgedFact, ...]:
    """Return the facts with those that ``--trust`` names as trusted."""
    return tuple(replace(fact, status=Status.TRUSTED) if fact.name in trust and fact.open else fact for fact in facts)


def contradictions(facts: Iterable[JudgedFact], plan: Plan) -> tuple[Finding, ...]:
    """Return a finding for each fact that something contradicts."""
    return tuple(_contradicted(fact, plan) for fact in facts if fact.status is Status.CONTRADICTED)


def require_verified(facts: Iterable[JudgedFact]) -> Finding | None:
    """Return why a comparison of the two models is no proof; None when each fact that decides is verified or trusted."""
    unknown = [fact for fact in facts if fact.open]
    if not unknown:
        return None
    options = " ".join(f"--trust {name}" for name in dict.fromkeys(fact.name for fact in unknown))
    steps = dict.fromkeys(BY_HAND.get(fact.next, fact.next) for fact in unknown)
    by_hand = any(fact.next in BY_HAND for fact in unknown)
    return Finding(
        "fact-unverified",
        "both models compute with values that nothing confirms",
        got="; ".join(f"{fact.shown} ({fact.origin})" for fact in unknown),
        fix=f"{'; '.join(steps)}, {'then' if by_hand else 'or'} give {options}",
        data={"facts": list(dict.fromkeys(fact.name for fact in unknown))},
    )


def not_proven(level: LevelReport, facts: Iterable[JudgedFact]) -> LevelReport:
    """Return a model level that passed as inconclusive, if both models have an unconfirmed value from the same place."""
    facts = tuple(facts)
    unverified = require_verified(facts)
    if unverified is None or level.level != "model" or level.verdict is not Verdict.PASSED:
        return level
    named = {
        f.name: f"{f.name} ({f.value})" if ":" in f.name else f.name for f in facts if f.open
    }  # such as a dropped leaf
    reason = f"equal, but not verified: {', '.join(named.values())}"
    return replace(level, verdict=Verdict.INCONCLUSIVE, reason=reason, findings=(unverified,))


def _other_settings(plan: Plan) -> list[str]:
    """Return the sizes and choices that the user gives; a permission, such as that of custom cells, is no fact."""
    permissions = {name for rule in plan.rules.rules for name in rule.kind.settings}
    return [name for name in plan.settings if name not in plan.facts and name not in permissions]


def require_names(trust: Collection[str], plan: Plan) -> tuple[str, ...]:
    """Return the names of the facts of the plan, which are those that ``--trust`` may give in addition to unseen ones.

    Raises:
        OptionError: `trust` names something else.
    """
    names = (*plan.facts, *_other_settings(plan))
    known = sorted({*names, *(fact.name for fact in declared_facts(plan) if fact.layer is not None)})
    for name in trust:
        if name not in known and UNSEEN not in name:
            raise OptionError(
                Finding(
                    "fact-unknown",
                    "the plan has no such fact",
                    rule=plan.rules.path,
                    path=f"--trust {name}",
                    expected=f"one of {', '.join(known)}" if known else "no --trust, as the plan has no facts",
                    got=name,
                    fix=did_you_mean(name, known) or "leave it out",
                )
            )
    return names


def _deciding(plan: Plan) -> Iterator[str]:
    """Yield the facts on which the tensors or what the loaded model computes depends."""
    for key, template in flatten(plan.rules.targets[plan.target].config):
        if not harmless(key):
            yield from references({key: template})
    for rule in plan.rules.rules:
        yield from facts_of(rule)
    yield from (name for product in plan.rules.products for name in product.names if name in plan.rules.facts)


def _factors(plan: Plan) -> set[str]:
    """Return the facts that do nothing but scale weights: a wrong one is in the tensors, and not in the JAX model."""
    rules, config = plan.rules.rules, plan.rules.targets[plan.target].config
    facts = {rule.prescaled_by.fact for rule in rules if rule.prescaled_by is not None}
    facts |= {rule.kind.pair.scale.fact for rule in rules if rule.kind.pair is not None}
    return {fact for fact in facts if fact is not None}.difference(references(config))


def _origin(plan: Plan, stated: Mapping[str, Mapping[str, Any]], name: str) -> str:
    if name in plan.settings:
        origin = next((origin for origin, settings in stated.items() if name in settings), "--set")
        return f"--set {name}={shown(plan.settings[name])}" if origin == "--set" else origin
    if plan.rules.sidecar is not None and name in sidecar_facts(plan.rules, plan.sidecar):
        return place_in_sidecar(plan.rules, plan.sidecar, name)
    return origin_in_rules(plan, name)


# ---- evidence


def _evidence(
    plan: Plan, stated: Mapping[str, Mapping[str, Any]], name: str, value: Any, constants: Collection[str]
) -> tuple[Status, str]:
    """Return what is known of a fact.

    What belongs to this checkpoint comes before what was published: a model may have been trained with another value.
    """
    if name in plan.confirmed or name in plan.rules.layer_types:
        return Status.VERIFIED, "the tree"
    own = sidecar_facts(plan.rules, plan.sidecar)
    recorded = {origin: settings for origin, settings in stated.items() if origin.startswith(RECORDED)}
    file = plan.rules.sidecar.file if plan.rules.sidecar else ""
    for origin, settings in {f"{file} of the checkpoint": own, **recorded}.items():
        if name in settings:
            if equal(settings[name], value):
                return Status.VERIFIED, origin
            return Status.CONTRADICTED, f"{shown(settings[name])} ({origin})"
    known = list(published(plan.rules.model, plan.sizes))
    entries = [entry for entry in known if name in entry.facts or name in entry.sizes]
    agree = next((entry for entry in entries if _states(entry, name, value)), None)
    against = next((entry for entry in entries if entry.binding and not _states(entry, name, value)), None)
    if against is not None:
        # The user of another size may know better than the publication; the rules claim to be of the family.
        may_differ = name in plan.settings and plan.version is None and not any(entry.sizes for entry in known)
        status = Status.UNVERIFIED if may_differ else Status.CONTRADICTED
        return status, f"{_shown(against.facts[name])} ({against.source})"
    if agree is not None:
        return Status.VERIFIED, agree.source
    if name in constants:
        return Status.VERIFIED, "a constant in the code of the target"
    return Status.UNVERIFIED, ""


def _states(entry: Published, name: str, value: Any) -> bool:
    return entry.sizes[name] == value if name not in entry.facts else equal(entry.facts[name], value)


def equal(published: Any, value: Any) -> bool:
    """Whether a value is the published one, or one of them."""
    if isinstance(published, OneOf):
        return any(equal(one, value) for one in published.values)
    if isinstance(published, Every):
        if isinstance(value, Mapping):  # for any number of layers
            value = value.get("repeat")
        words = value if isinstance(value, list) and value else [None]
        return all(word == published.period[k % len(published.period)] for k, word in enumerate(words))
    return same("activation" if isinstance(published, str) else "", published, value)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Every | OneOf) else shown(value)


def _contradicted(fact: JudgedFact, plan: Plan) -> Finding:
    in_rules = fact.name in plan.facts and fact.origin == origin_in_rules(plan, fact.name)
    sidecar = plan.rules.sidecar
    stated = sidecar is not None and fact.name in sidecar_facts(plan.rules, plan.sidecar)
    own = f"put its {sidecar.file} next to the checkpoint, or " if sidecar is not None and not stated else ""
    return Finding(
        "fact-contradicted",
        "the models compute with another value than the one that is known of this model",
        fact.origin if in_rules else "",
        fact.name,
        fact.evidence,
        f"{shown(fact.value)} ({fact.origin})",
        f"correct {fact.origin}; if the model was trained with this value, {own}give --trust {fact.name}",
        {
            "fact": fact.name,
            "value": fact.value,
            "from": fact.origin,
            "evidence": fact.evidence,
            "diagnosis": fact.name,
        },
    )
