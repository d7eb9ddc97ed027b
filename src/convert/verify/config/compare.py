"""What no weight tells (activations, epsilons, factors of norms, RoPE base, ...): the rules' word against the target's.

The source's side is what the rules declare. The target's side is what it is configured to compute: ``config.json`` beside the
weights, and the live module. A difference is a finding even when the outputs agree on the inputs that were tried.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from convert.core.findings import Finding
from convert.core.yaml_nodes import Node
from convert.layers.shared_keys import ACTIVATION_NAMES
from convert.planning.plan import Plan
from convert.rules.file import parse_reference
from convert.verify.config.declared import OF_A_LAYER, Stated, declared, declared_in_header
from convert.verify.config.hf_config import OtherKeys, class_config, flat, other_keys
from convert.verify.config.impact import worst
from convert.verify.report.report import LevelReport, Verdict
from convert.verify.written import Written
from convert.writing.provenance import header_metadata

if TYPE_CHECKING:
    from convert.references.protocol import Reference

# the last word of a key of config.json -> the fact that it states, where the rules give no template for the key
CONFIG_FACTS: Mapping[str, str] = {
    "activation": "activation",
    "activation_function": "activation",
    "hidden_act": "activation",
    "hidden_activation": "activation",
    "ff_activation": "activation",
    "epsilon": "epsilon",
    "rms_norm_eps": "epsilon",
    "rms_norm_epsilon": "epsilon",
    "layer_norm_eps": "epsilon",
    "layer_norm_epsilon": "epsilon",
    "layernorm_epsilon": "epsilon",
    "norm_eps": "epsilon",
    "norm_epsilon": "epsilon",
    "rope_theta": "rope_theta",
    "pad_val": "pad_value",
}
# our name of an activation -> that of transformers 5.23 (``activations.ACT2FN``), where it is another
TRANSFORMERS_NAMES = {"gelu_tanh": "gelu_pytorch_tanh", "gelu_erf": "gelu", "none": "linear"}
INNER = ("rope_parameters", "rope_scaling", "text_config")  # of config.json: those whose keys speak of the same model
NO_FACTS = ("architectures", "model_type", "dtype", "torch_dtype")  # which class loads it, and in what precision
UNREADABLE = ("unknown", "none")  # what a live module's fact is when it could not be read off; `none` for a norm alone


@dataclass(frozen=True)
class Facts:
    """What came of comparing facts.

    Attributes:
        findings: what differs.
        notes: what was compared, and what could not be read off.
        seconds: it took.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    seconds: float


def check_facts(plan: Plan | None, written: Written, reference: Reference | str | None = None) -> Facts:
    """Compares what the source computes with what the target is configured to compute.

    Args:
        plan: the rules' word; None when the file's header must do.
        reference: builds the target's module; the reason, when there is none.
    """
    started = time.monotonic()
    said = declared(plan) if plan is not None else declared_in_header(written)
    if not said:
        return Facts((), ("no facts to compare: neither rules nor the file's header state any",), 0.0)
    comparison = _Comparison(said, _sizes(plan, written))
    findings = [*_header(plan, written, comparison)] if plan is not None else []
    notes = []
    other = other_keys(plan, written) if plan is not None else OtherKeys()
    config_findings, config_notes = _config(plan, written, comparison, other.unread)
    findings += config_findings
    findings += [one for one in other.findings if one.path not in {finding.path for finding in config_findings}]
    notes += [*config_notes, *other.notes]
    differ = {finding.data["fact"] for finding in config_findings}
    keys = ", ".join(finding.path for finding in other.findings)
    causes = dict.fromkeys({fact.name for fact in comparison.compared if not fact.layer} - differ, keys) if keys else {}
    causes |= other.causes
    if reference is None or isinstance(reference, str):
        notes.append(f"the target's module was not asked for its facts{f': {reference}' if reference else ''}")
    else:
        findings += _module(written, reference, comparison, notes, causes)
    unread = [fact for fact in said if fact not in comparison.compared]
    notes.insert(0, f"{len(said) - len(unread)} of {len(said)} declared facts compared with the target's configuration")
    if unread:
        shown = ", ".join(f"{fact.name} {fact.where}" if fact.layer else fact.name for fact in unread)
        notes.append(f"could not be read off the target, so not compared: {shown}")
    return Facts(tuple(findings), tuple(notes), time.monotonic() - started)


def with_facts(level: LevelReport, facts: Facts) -> LevelReport:
    """The same report with what came of comparing facts; a difference fails the level, even one that was skipped."""
    return replace(
        level,
        verdict=Verdict.FAILED if facts.findings else level.verdict,
        reason="" if facts.findings else level.reason,
        findings=(*level.findings, *facts.findings),
        notes=(*level.notes, *facts.notes),
        seconds=level.seconds + facts.seconds,
    )


def _sizes(plan: Plan | None, written: Written) -> Mapping[str, int]:
    sizes: Mapping[str, int] = plan.sizes if plan is not None else written.stated("sizes")
    return sizes


class _Comparison:
    """Facts of the source's side, and which of them the target's side was found to state as well."""

    def __init__(self, said: list[Stated], sizes: Mapping[str, int]) -> None:
        self.said, self.sizes = said, sizes
        self.compared: list[Stated] = []
        context = next((fact.value for fact in said if fact.name == "context_length"), None)
        self.context = context if isinstance(context, int) and context > 0 else 4096

    def named(self, name: str, module: str | None = None) -> list[Stated]:
        """Facts of this name: of a module, or of the whole model."""
        return [
            fact
            for fact in self.said
            if fact.name == name and (fact.layer.match(module) is not None if module and fact.layer else not fact.layer)
        ]

    def differ(self, facts: list[Stated], value: Any, where: str, repair: str, name: str = "") -> Finding | None:
        """A finding when `value` is none of what `facts` allow; they count as compared."""
        self.compared += [fact for fact in facts if fact not in self.compared]
        if not facts or any(same(fact.name, own, value) for fact in facts for own in (*fact.allowed, fact.value)):
            return None
        first = facts[0]
        got = canonical(value) if first.name == "activation" else value
        size = worst(first.name, first.value, got, self.sizes, self.context)
        wanted = " or ".join(dict.fromkeys(_shown(fact.value) for fact in facts))
        return Finding(
            "fact-differs",
            f"{first.name}: the source computes with {wanted} {first.where}, and {where} says {_shown(value)}"
            + (f"; {size.said}" if size.said else "")
            + f". {repair}",
            rule=first.at,
            path=name,
            data={
                "fact": first.name,
                "declared": first.value,
                "configured": value,
                "where": where,
                "worst": dict(size.data),
                "diagnosis": first.name,
                "repair": repair,
            },
        )


def same(name: str, one: Any, two: Any) -> bool:
    """Whether two sides state the same: names of activations by what they mean, numbers as float32 tells them apart."""
    if name == "activation":
        return bool(canonical(one) == canonical(two))
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(same("", a, b) for a, b in zip(one, two, strict=True))
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, int | float) and isinstance(two, int | float):
        return math.isclose(one, two, rel_tol=1e-7)
    return bool(one == two)


def canonical(activation: Any) -> Any:
    """Our name of an activation."""
    return ACTIVATION_NAMES.get(activation, activation) if isinstance(activation, str) else activation


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if math.isclose(float(f"{value:g}"), value, rel_tol=1e-7) else repr(value)
    return str(value)


# ---- the header


def _header(plan: Plan, written: Written, comparison: _Comparison) -> Iterator[Finding]:
    """What the file says that it was made with; a file of other code says nothing."""
    known = header_metadata(plan)
    if all(key not in written.metadata or written.metadata[key] == known[key] for key in ("facts", "layers")):
        return
    repair = "Convert again with these rules, or check with those that made the file"
    for fact in declared_in_header(written):
        text = fact.layer.text if fact.layer else None
        ours = [f for f in comparison.said if f.name == fact.name and (f.layer.text if f.layer else None) == text]
        compared = list(comparison.compared)  # what the header says is not what the target computes
        found = comparison.differ(ours, fact.value, f"the {fact.at}", repair, text or "")
        comparison.compared = compared
        if found is not None:
            yield found


# ---- config.json


def _config(
    plan: Plan | None, written: Written, comparison: _Comparison, unread: Collection[str]
) -> tuple[list[Finding], list[str]]:
    """``config.json`` against what the rules would write into it, and against facts under other well-known names.

    Args:
        unread: keys that the class does not read, whatever their names say.
    """
    templates = dict(flat(plan.rules.targets[plan.target].config)) if plan is not None else {}
    if written.config is None:
        wanted = "; the target's class must be given its configuration by other means" if templates else ""
        return [], [f"no config.json beside the weights{wanted}"] if templates else []
    stated = dict(flat(written.config))
    findings: list[Finding | None] = []
    open_keys = []
    for key, template in templates.items():
        if key in NO_FACTS:
            continue
        facts = _expected(plan, key, template, comparison) if plan is not None else []
        if not facts:
            open_keys.append(key)
        elif key in stated:
            findings.append(comparison.differ(facts, stated[key], f"config.json's {key}", _set(key, facts), key))
        else:
            findings.append(_default(written.config, key, facts, comparison, open_keys))
    for key, value in stated.items():
        if key not in {*templates, *NO_FACTS, *unread} and (facts := _by_name(key, comparison)):
            findings.append(comparison.differ(facts, value, f"config.json's {key}", _set(key, facts), key))
    notes = [f"config.json: nothing tells what it should say for {', '.join(open_keys)}"] if open_keys else []
    return [finding for finding in findings if finding is not None], notes


def _set(key: str, facts: list[Stated]) -> str:
    value = facts[0].value
    shown = json.dumps(TRANSFORMERS_NAMES.get(value, value) if facts[0].name == "activation" else value)
    return f"Set {key} to {shown} in config.json, or correct the rules if the source has another value"


def _expected(plan: Plan, key: str, template: Any, comparison: _Comparison) -> list[Stated]:
    """What a key that the rules have a template for must say; empty when a fact that it needs is not known."""
    name, more = parse_reference(template) or (None, 0)
    if name is not None and name not in plan.sizes:
        facts = comparison.named(name)
        if more:
            comparison.compared += [fact for fact in facts if fact not in comparison.compared]
        return [replace(fact, value=fact.value + more) if more else fact for fact in facts]
    node: Node | None = plan.rules.node.value["targets"].value[plan.target].value["config"]
    for part in key.split("."):
        node = node.value[part] if node is not None else None
    assert node is not None
    last = key.rsplit(".", 1)[-1]
    value = plan.sizes[name] + more if name is not None else template
    fact = CONFIG_FACTS.get(last, last)
    if fact in OF_A_LAYER:  # the rules of single layers say the same; they count as compared, too
        layers = [f for f in comparison.said if f.name == fact and f.layer and same(fact, f.value, value)]
        comparison.compared += [f for f in layers if f not in comparison.compared]
    return [Stated(fact, value, node.at.line_only)]


def _by_name(key: str, comparison: _Comparison) -> list[Stated]:
    """The facts that a key states by its name alone; several when layers differ and the key does not say which it means."""
    *path, last = key.split(".")
    if any(part not in INNER for part in path):
        return []
    name = CONFIG_FACTS.get(last, last)
    if name in OF_A_LAYER and name not in CONFIG_FACTS.values():
        return []  # strides, padding, ...: which of many layers such a key means is not known
    kind = {"rms": "rms_norm", "lay": "layer_norm"}.get(last[:3], "")
    layers = [f for f in comparison.said if f.name == name and f.layer and (not kind or f.kind == kind)]
    return layers if name in OF_A_LAYER else comparison.named(name)


def _default(
    config: Mapping[str, Any], key: str, facts: list[Stated], comparison: _Comparison, open_keys: list[str]
) -> Finding | None:
    """A key that config.json leaves out: the class's default holds, which transformers tells, if it is there."""
    try:
        full = class_config(config, config)
    except Exception:  # noqa: BLE001 - not installed, or a configuration that it refuses in a way of its own
        full = {}
    if key not in full:
        open_keys.append(f"{key} (left out; the class's default is not known here)")
        return None
    where = f"config.json has no {key}, and transformers' default"
    return comparison.differ(facts, full[key], where, _set(key, facts), key)


# ---- the live module


def _module(
    written: Written, reference: Reference, comparison: _Comparison, notes: list[str], causes: Mapping[str, str]
) -> Iterator[Finding]:
    """What the target's own module computes, as `Reference.facts` reads it off; alike findings of many layers are one.

    Args:
        causes: a setting of the target's -> the key of config.json that changes it.
    """
    from convert.verify.config.meta_module import facts_of

    live, problem = facts_of(written, reference)
    if problem:
        notes.append(f"the target's module did not tell its facts: {problem}")
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    unruled: dict[str, list[str]] = {}
    for module, said in live.items():
        for name, value in said.items():
            facts = comparison.named(name, module or None if name in OF_A_LAYER else None)
            if name in OF_A_LAYER and not any(fact.layer for fact in facts):
                unruled.setdefault(name, []).append(module)
                continue
            if value is None or value == "unknown" or (name == "multiplies_by" and value in UNREADABLE):
                continue  # what is not compared is listed
            if name == "padding" and _elsewhere(facts, value):
                continue
            where = f"the target's module {module}" if module else "the target's module"
            repair = (
                f"Configure {module or 'it'} with {name} {_shown(facts[0].value)}, or correct the rules if the source has {_shown(value)}"
                if facts
                else ""
            )
            if name in causes:
                repair = f"That follows from {causes[name]} in config.json, which the rules do not write: remove it"
            found = comparison.differ(facts, value, where, repair, module)
            if found is not None:
                groups.setdefault((name, str(value), facts[0].at), []).append(found)
    for name, modules in unruled.items():
        notes.append(f"the rules say nothing of the {name} of {_few(modules)}")
    for group in groups.values():
        first = group[0]
        more = f" So do {len(group) - 1} more modules of this rule." if len(group) > 1 else ""
        yield replace(first, problem=first.problem + more, data={**first.data, "modules": [f.path for f in group]})


def _elsewhere(facts: list[Stated], value: Any) -> bool:
    """Whether a convolution without padding may have it done by other code, which nothing tells."""
    if not isinstance(value, list) or any(value):
        return False
    exact = [own for fact in facts for own in fact.allowed if own == value]
    return not exact or any("F.pad" in str(fact.value) for fact in facts)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
