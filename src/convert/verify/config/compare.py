"""Compare the hyperparameters that no weight holds with what the target is configured to compute.

The rules declare the side of the source. ``config.json`` and the live module state the side of the target. A difference is a
finding even when the outputs agree on the inputs that were tried.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from convert.core.findings import Finding
from convert.core.yaml_nodes import YamlNode
from convert.layers.conv.padding import STATED
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.rules.file import parse_reference
from convert.rules.names_used import facts_of
from convert.verify.config.declared import LAYER_FACTS, DeclaredFact, declared_facts, recorded_facts
from convert.verify.config.generation import compare_generation
from convert.verify.config.hf_config import OtherKeys, class_config, compare_other_keys, compare_training_keys, flatten
from convert.verify.config.impact import impact_of
from convert.verify.config.same_value import canonical, same, shown
from convert.verify.report.facts import JudgedFact
from convert.verify.report.report import LevelReport, Verdict
from convert.writing.provenance import header_metadata
from convert.writing.written import Written

# last part of a key of config.json -> the fact that it states, for keys without a template in the rules
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
# name of an activation in the rules -> its name in transformers 5.23 (``activations.ACT2FN``)
TRANSFORMERS_NAMES = {"gelu_tanh": "gelu_pytorch_tanh", "gelu_erf": "gelu", "none": "linear"}
INNER = ("rope_parameters", "rope_scaling", "text_config")  # sections of config.json about the same model
NO_FACTS = ("architectures", "_class_name", "model_type", "dtype", "torch_dtype")  # class and precision, not a fact
TORCH_NAMES = {"strides": "stride"}  # fact -> torch's name for it, where they differ
TRAINING_FACTS = ("momentum",)  # that only training reads
GEOMETRY = ("strides", "dilation", "padding", "output_padding")  # of a convolution
COMPARED_BY_OUTPUTS = "nothing to do if the model level passes, as another value would change its outputs; if it does not run, compare the code of the two models"
FACTOR = "multiplies_by"
UNREADABLE = ("unknown", "none")  # a fact of a live module that could not be read; `none` only for norms


@dataclass(frozen=True)
class Facts:
    """The outcome of the comparison.

    Attributes:
        findings: facts that differ.
        notes: what was compared.
        seconds: wall time.
        unread: facts that could not be read from the target.
        constants: facts that the code of the target has as constants, and that were compared with them.
        unseen: what the comparison of the two models does not show.
    """

    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    unread: tuple[DeclaredFact, ...] = ()
    constants: frozenset[str] = frozenset()
    unseen: tuple[JudgedFact, ...] = ()


def check_facts(
    plan: Plan | None, written: Written, reference: Reference | str | None = None, *, training: bool = False
) -> Facts:
    """Compare what the source computes with what the target is configured to compute.

    Args:
        plan: states the facts of the source; None takes those in the metadata of the file.
        reference: builds the target's module; the reason, when there is none.
        training: whether a difference that only training sees is a finding; otherwise it is a note.
    """
    started = time.monotonic()
    facts = declared_facts(plan) if plan is not None else recorded_facts(written)
    if not facts:
        return Facts((), ("no facts to compare: neither the rules nor the metadata of the file state any",))
    comparison = _Comparison(facts, _sizes(plan, written))
    findings = [*_header(plan, written, comparison)] if plan is not None else []
    notes = []
    other = compare_other_keys(plan, written) if plan is not None else OtherKeys()
    config_findings, config_notes = _config(plan, written, comparison, other.unread)
    findings += config_findings
    known = {finding.path for finding in config_findings}
    findings += [finding for finding in other.findings if finding.path not in known]
    notes += [*config_notes, *other.notes]
    if plan is not None:
        generation = compare_generation(plan, written)
        findings += [finding for finding in generation.findings if finding.path not in known]
        notes += generation.notes
    differ = {finding.data["fact"] for finding in config_findings}
    keys = ", ".join(finding.path for finding in other.findings)
    causes = dict.fromkeys({fact.name for fact in comparison.compared if not fact.layer} - differ, keys) if keys else {}
    causes |= other.causes
    if reference is None or isinstance(reference, str):
        notes.append(f"the facts of the target's module were not read{f': {reference}' if reference else ''}")
    else:
        products = (
            {step.name.rpartition(".")[0] for step in plan.steps if step.kind_name == "linear"} if plan else set()
        )
        findings += _module(written, reference, comparison, notes, causes, products, training=training)
    trained = [finding for finding in findings if finding.data.get("fact") in TRAINING_FACTS]
    findings = [finding for finding in findings if finding not in trained]
    trained += compare_training_keys(plan, written) if plan is not None else ()
    if training:
        findings += trained
    else:
        notes += [f"only training sees this difference, which --training counts: {finding}" for finding in trained]
    unread = [fact for fact in facts if fact not in comparison.compared]
    others = ", ".join(dict.fromkeys(fact.name for fact in unread))
    notes.insert(
        0,
        f"{len(facts) - len(unread)} of {len(facts)} declared facts compared with the target's configuration"
        f"{f'; not read from it: {others}' if unread else ''}",
    )
    constants = frozenset(_constants(plan, comparison.in_code)) if plan is not None else frozenset()
    return Facts(tuple(findings), tuple(notes), time.monotonic() - started, tuple(unread), constants)


def _constants(plan: Plan, in_code: Collection[DeclaredFact]) -> Iterator[str]:
    """Yield the facts of the model that code of the target states: where the rules write no configuration, it has them as constants."""
    if plan.rules.targets[plan.target].config:
        return
    stated = {fact.name for fact in in_code if not fact.layer}
    by_layer = {(fact.layer.text, fact.name): fact.value for fact in in_code if fact.layer}
    for name, value in plan.facts.items():
        layers = [rule.layer(plan.target) for rule in plan.rules.rules if name in facts_of(rule)]
        texts = [layer.path.text for layer in layers if layer is not None]
        if name in stated or (
            texts
            and all(any(same(key[1], own, value) for key, own in by_layer.items() if key[0] == text) for text in texts)
        ):
            yield name


def with_facts(level: LevelReport, facts: Facts) -> LevelReport:
    """Add the outcome of the comparison to a level; a difference fails the level, even one that was skipped."""
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
    """The facts of the source, and those of them that were compared."""

    def __init__(self, facts: list[DeclaredFact], sizes: Mapping[str, int]) -> None:
        self.facts, self.sizes = facts, sizes
        self.compared: list[DeclaredFact] = []
        self.in_code: list[DeclaredFact] = []  # compared with the live module
        context = next((fact.value for fact in facts if fact.name == "context_length"), None)
        self.context = context if isinstance(context, int) and context > 0 else 4096

    def named(self, name: str, module: str | None = None) -> list[DeclaredFact]:
        """Return the facts of this name: of a module, or of the whole model."""
        return [
            fact
            for fact in self.facts
            if fact.name == name and (fact.layer.match(module) is not None if module and fact.layer else not fact.layer)
        ]

    def compare(self, facts: list[DeclaredFact], value: Any, where: str, fix: str, path: str = "") -> Finding | None:
        """Return a finding when `value` is none of those that `facts` allow; they count as compared."""
        self.compared += [fact for fact in facts if fact not in self.compared]
        if not facts or any(same(fact.name, own, value) for fact in facts for own in (*fact.allowed, fact.value)):
            return None
        first = facts[0]
        declared, configured = (canonical(v) if first.name == "activation" else v for v in (first.value, value))
        impact = impact_of(first.name, declared, configured, self.sizes, self.context)
        expected = " or ".join(dict.fromkeys(shown(fact.value) for fact in facts))
        return Finding(
            "fact-differs",
            f"the target is configured with another {first.name}" + (f" ({impact.text})" if impact.text else ""),
            first.at,
            path,
            f"{expected}{f' of {first.layer.text}' if first.layer else ''}",
            f"{shown(value)} ({where})",
            fix,
            {
                "fact": first.name,
                "declared": first.value,
                "configured": value,
                "where": where,
                "impact": dict(impact.data),
                "diagnosis": first.name,
            },
        )


# ---- the header


def _header(plan: Plan, written: Written, comparison: _Comparison) -> Iterator[Finding]:
    """Compare the facts that the metadata records with those of the rules; files of other code record none."""
    current = header_metadata(plan)
    if all(key not in written.metadata or written.metadata[key] == current[key] for key in ("facts", "layers")):
        return
    fix = "convert again with these rules, or check with the rules of the conversion"
    for fact in recorded_facts(written):
        text = fact.layer.text if fact.layer else None
        ours = [f for f in comparison.facts if f.name == fact.name and (f.layer.text if f.layer else None) == text]
        compared = list(comparison.compared)  # the target does not compute with the metadata
        finding = comparison.compare(ours, fact.value, f"the {fact.at}", fix, text or "")
        comparison.compared = compared
        if finding is not None:
            yield finding


# ---- config.json


def _config(
    plan: Plan | None, written: Written, comparison: _Comparison, unread: Collection[str]
) -> tuple[list[Finding], list[str]]:
    """Compare ``config.json`` with what the rules write into it, and with facts under other well-known names.

    Args:
        unread: keys that the class does not read.
    """
    templates = dict(flatten(plan.rules.targets[plan.target].config)) if plan is not None else {}
    if written.config is None:
        note = "there is no config.json next to the weights, so the configuration of the target's class is unknown"
        return [], [note] if templates else []
    stated = dict(flatten(written.config))
    findings: list[Finding | None] = []
    open_keys = []
    for key, template in templates.items():
        if key in NO_FACTS:
            continue
        facts = _expected(plan, key, template, comparison) if plan is not None else []
        if not facts:
            open_keys.append(key)
        elif key in stated:
            findings.append(comparison.compare(facts, stated[key], f"config.json's {key}", _set(key, facts), key))
        else:
            findings.append(_default(written.config, key, facts, comparison, open_keys))
    inner = {key.rsplit(".", 1)[1] for key in templates if "." in key and key in stated}
    compared = {
        *templates,
        *NO_FACTS,
        *unread,
        *inner,
    }  # PaliGemma's class writes its default `vocab_size` beside the text model's
    for key, value in stated.items():
        stands = value is not None and key not in compared  # null: what the class takes without it
        if stands and (facts := _by_name(key, comparison)):
            findings.append(comparison.compare(facts, value, f"config.json's {key}", _set(key, facts), key))
    notes = [f"config.json: the expected value is unknown for {', '.join(open_keys)}"] if open_keys else []
    return [finding for finding in findings if finding is not None], notes


def _set(key: str, facts: list[DeclaredFact]) -> str:
    value = facts[0].value
    shown = json.dumps(TRANSFORMERS_NAMES.get(value, value) if facts[0].name == "activation" else value)
    return f"set {key} to {shown} in config.json, or correct the rules if the source has another value"


def _expected(plan: Plan, key: str, template: Any, comparison: _Comparison) -> list[DeclaredFact]:
    """Return the facts that a key with a template must state; empty when a fact that it needs is unknown."""
    name, more = parse_reference(template) or (None, 0)
    if name is not None and name not in plan.sizes:
        facts = comparison.named(name)
        if more:
            comparison.compared += [fact for fact in facts if fact not in comparison.compared]
        return [replace(fact, value=fact.value + more) if more else fact for fact in facts]
    node: YamlNode | None = plan.rules.node.value["targets"].value[plan.target].value["config"]
    for part in key.split("."):
        node = node.value[part] if node is not None else None
    assert node is not None
    last = key.rsplit(".", 1)[-1]
    value = plan.sizes[name] + more if name is not None else template
    fact = CONFIG_FACTS.get(last, last)
    if fact in LAYER_FACTS:  # the rules of single layers state the same
        layers = [f for f in comparison.facts if f.name == fact and f.layer and same(fact, f.value, value)]
        comparison.compared += [f for f in layers if f not in comparison.compared]
    return [DeclaredFact(fact, value, node.at.line_only)]


def _by_name(key: str, comparison: _Comparison) -> list[DeclaredFact]:
    """Return the facts that a key states by its name alone; several, when layers differ."""
    *path, last = key.split(".")
    if any(part not in INNER for part in path):
        return []
    name = CONFIG_FACTS.get(last, last)
    if name in LAYER_FACTS and name not in CONFIG_FACTS.values():
        return []  # strides, padding, ...: it is unknown which of many layers is meant
    kind = {"rms": "rms_norm", "lay": "layer_norm"}.get(last[:3], "")
    layers = [f for f in comparison.facts if f.name == name and f.layer and (not kind or f.kind == kind)]
    return layers if name in LAYER_FACTS else comparison.named(name)


def _default(
    config: Mapping[str, Any], key: str, facts: list[DeclaredFact], comparison: _Comparison, open_keys: list[str]
) -> Finding | None:
    """Compare the default of the class for a key that config.json leaves out, if transformers is installed."""
    try:
        full = class_config(config, config)
    except Exception:  # noqa: BLE001 - not installed, or it rejects the configuration with any exception
        full = {}
    if key not in full:
        open_keys.append(f"{key} (left out; the default of the class is unknown)")
        return None
    where = f"the default of transformers, as config.json has no {key}"
    return comparison.compare(facts, full[key], where, _set(key, facts), key)


# ---- the live module


def _module(
    written: Written,
    reference: Reference,
    comparison: _Comparison,
    notes: list[str],
    causes: Mapping[str, str],
    products: Collection[str],
    *,
    training: bool,
) -> Iterator[Finding]:
    """Compare what the live module computes, by `Reference.facts`; equal findings of many layers are one.

    Args:
        causes: setting of the target -> the key of config.json that changes it.
        products: modules whose weights are matrices of products in the source: no rule can declare the geometry of a convolution there.
        training: whether what only training reads counts.
    """
    from convert.verify.config.meta_module import facts_of

    live, problem = facts_of(written, reference)
    if problem:
        notes.append(f"the facts of the target's module could not be read: {problem}")
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    undeclared: dict[str, list[str]] = {}
    if unread := [module or "the module" for module, stated in live.items() if stated.get(FACTOR) == "unknown"]:
        notes.append(
            f"what {_few(unread)} multiplies by could not be measured: the code does not run alone, or is no norm with one factor; "
            f"compare it with the rules, and add --trust {FACTOR} if it is as they say"
        )
    for module, stated in live.items():
        for name, value in stated.items():
            facts = comparison.named(name, module or None if name in LAYER_FACTS else None)
            if name in LAYER_FACTS and not any(fact.layer for fact in facts):
                if name not in GEOMETRY or module not in products:
                    undeclared.setdefault(name, []).append(module)
                continue
            if value is None or value == "unknown" or (name == FACTOR and value in UNREADABLE):
                continue  # listed as not compared
            if name == "padding" and _may_be_made_elsewhere(facts, value):
                continue
            where = f"the target's module {module}" if module else "the target's module"
            fix = _configure(module or "it", name, facts[0].value, value) if facts else ""
            if name in causes:
                fix = f"remove {causes[name]} from config.json: it changes this value, and the rules do not write it"
            comparison.in_code += facts
            finding = comparison.compare(facts, value, where, fix, module)
            if finding is not None and name == "padding":
                finding = replace(finding, got=f"{_padding(value)} ({where})")
            if finding is not None:
                groups.setdefault((name, str(value), facts[0].at), []).append(finding)
    missing: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
    for name, modules in undeclared.items():
        missing.setdefault((name in TRAINING_FACTS, tuple(modules)), []).append(name)
    for (trained, of), names in missing.items():
        if training or not trained:
            shown = "" if trained else f": {COMPARED_BY_OUTPUTS}"
            notes.append(f"the rules do not declare the {', '.join(names)} of {_few(of)}{shown}")
    for group in groups.values():
        first = group[0]
        more = f"; {len(group) - 1} more modules of this rule do so" if len(group) > 1 else ""
        data = {**first.data, "modules": [finding.path for finding in group]}
        yield replace(first, problem=first.problem + more, data=data)


def _configure(module: str, name: str, declared: Any, value: Any) -> str:
    """Say how to correct one of the two sides, each in its own terms."""
    if name == "padding":
        return f"make it {declared} in the code of {module}, or correct `padding` of the rule if the source pads like {_padding(value)}; if the code around {module} does the rest, state its `padding` in the rule's target"
    source = round(1 - value, 12) if name == "momentum" else value
    other = f"{name} {shown(source)}{f', which is {shown(value)} in torch' if source != value else ''}"
    return f"configure {module} with {TORCH_NAMES.get(name, name)} {shown(declared)}, or correct the rules if the source has {other}"


def _padding(value: Any) -> str:
    return f"padding={tuple(value) if isinstance(value, list) else repr(value)}"


def _may_be_made_elsewhere(facts: list[DeclaredFact], value: Any) -> bool:
    """Whether other code may pad the input of a convolution that pads nothing itself, or cut the result of one that pads more."""
    if not isinstance(value, list):
        return False
    exact = [own for fact in facts for own in fact.allowed if own == value]
    if any(STATED in str(fact.value) for fact in facts):
        return False
    if any("F.pad" in str(fact.value) for fact in facts):
        return bool(exact) or not any(value)
    return not exact and not any(value)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
