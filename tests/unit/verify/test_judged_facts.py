"""Facts that no weight holds are compared with what does not come from the rules, `--set` or the header."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import convert
from convert.core.errors import ConvertError
from convert.core.path_pattern import parse_pattern
from convert.planning.plan import Plan
from convert.references.plan_facts import ReadFacts
from convert.references.published import PUBLISHED, Every, OneOf, published
from convert.rules.file import ASK
from convert.rules.library import available_rules, shipped_rules_dir
from convert.verify.config.declared import DeclaredFact
from convert.verify.config.judge import contradictions, equal, judge, of_layers, require_verified
from convert.verify.report.facts import BY_OUTPUTS, OUTPUTS_AGREE, JudgedFact, Status, listed, shown
from support import gemma_trees
from support.goldens import checkpoint
from support.marks import slow_but

SETTINGS: dict[str, Any] = {"vocab_size": 250, "sliding_window": 8, "query_pre_attn_scalar": 5}


def planned(rules: str, source: Any, *edits: tuple[str, str], folder: Path, **settings: Any) -> Plan:
    """The plan with an edited copy of the shipped rules."""
    text = (shipped_rules_dir() / f"{rules}.yaml").read_text()
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    (folder / f"{rules}.yaml").write_text(text)
    return convert.plan_conversion(str(folder / f"{rules}.yaml"), source, settings=settings)


def named(facts: tuple[JudgedFact, ...], name: str) -> JudgedFact:
    (fact,) = (fact for fact in facts if fact.name == name)
    return fact


# ---- what was published


@pytest.mark.parametrize("version", slow_but(sorted(gemma_trees.SIZES)[::4], sorted(gemma_trees.SIZES)))
def test_every_fact_of_a_published_gemma_is_verified(version: str) -> None:
    plan = convert.plan_conversion("gemma", gemma_trees.published(version))
    facts = judge(plan, {})
    assert plan.version == version and {fact.status for fact in facts} == {Status.VERIFIED}
    assert require_verified(facts) is None and contradictions(facts, plan) == () and listed(facts) == ()


def test_the_table_covers_every_fact_of_the_shipped_rules() -> None:
    """Those that every model of a family has, and those of each published size."""
    for rules in available_rules():
        stated = {name for entry in PUBLISHED[rules.model] if not entry.sizes for name in entry.facts}
        always = {name for name, value in rules.facts.items() if value != ASK}
        of_versions = {name for version in rules.versions for name in version.facts}
        missing = always - stated - of_versions
        by_size = {"vocab_size", "rope_factor", "mm_tokens_per_image"}
        assert missing <= by_size, f"{rules.model}: {missing}"  # stated for the published sizes
        for version in rules.versions:
            known: dict[str, Any] = {}
            for entry in published(rules.model, version.sizes):
                known |= entry.facts
            for name, value in {**rules.facts, **version.facts}.items():
                if value != ASK:
                    assert name in known and equal(known[name], value), f"{rules.model} {version.name}: {name}"


def test_the_table_names_models_of_the_shipped_rules_only() -> None:
    assert set(PUBLISHED) == {rules.model for rules in available_rules()}


@pytest.mark.parametrize(
    ("version", "old", "new", "fact"),
    [
        ("2-2b", "attn_logit_softcapping: 50.0", "attn_logit_softcapping: 30.0", "attn_logit_softcapping"),
        ("2-2b", "rope_theta: 10000.0\n      attn", "rope_theta: 1000000.0\n      attn", "rope_theta"),
        ("2-2b", "[sliding_attention, full_attention]", "[full_attention, sliding_attention]", "attention_pattern"),
        ("2-9b", "sliding_window: 4096, query_pre_attn_scalar: 256}\n        choices: {gating: FD}         # _gemma.py", "sliding_window: 4096, query_pre_attn_scalar: 224}\n        choices: {gating: FD}         # _gemma.py", "query_pre_attn_scalar"),
        ("3-1b", "sliding_window: 512", "sliding_window: 1024", "sliding_window"),
        ("3-4b", "rope_factor_global: 8.0", "rope_factor_global: 1.0", "rope_factor_global"),
        ("3-12b", "rope_theta_global: 1000000.0", "rope_theta_global: 10000.0", "rope_theta_global"),
        ("3-12b", "repeat: [sliding_attention, sliding_attention, ", "repeat: [full_attention, sliding_attention, ", "attention_pattern"),
        ("1-7b", "query_scale: 1 / sqrt(H)", "query_scale: 1 / H", "query_scale"),
    ],
)  # fmt: skip
def test_a_wrong_fact_of_a_published_size_is_a_finding(
    version: str, old: str, new: str, fact: str, tmp_path: Path
) -> None:
    """It names the fact, both values, their origins and the next step."""
    plan = planned("gemma", gemma_trees.published(version), (old, new), folder=tmp_path)
    found = contradictions(judge(plan, {}), plan)
    assert [finding.data["fact"] for finding in found] == [fact]
    for finding in found:
        assert finding.code == "fact-contradicted" and finding.rule.startswith(f"{tmp_path}/gemma.yaml:")
        assert finding.expected.endswith(")") and finding.rule in finding.got and f"--trust {fact}" in finding.fix


def test_a_pattern_that_starts_elsewhere_is_another_one() -> None:
    local, far = "sliding_attention", "full_attention"
    pattern = Every((local, local, far))
    assert equal(pattern, [local, local, far, local]) and not equal(pattern, [local, far, local, local])
    assert not equal(pattern, [far]) and not equal(pattern, []) and not equal(pattern, None)
    assert equal(OneOf((1, [1, 106])), [1, 106]) and not equal(OneOf((1, [1, 106])), [1, 107])


# ---- sizes that are not published


def test_settings_are_not_verified_and_must_be_trusted() -> None:
    plan = convert.plan_conversion("gemma", checkpoint("gemma2-2b"), settings=SETTINGS)
    stated = {"--set": {"sliding_window": 8}, "the header of out": SETTINGS}
    facts = judge(plan, stated)
    window = named(facts, "sliding_window")
    assert (window.status, window.origin) == (Status.UNVERIFIED, "--set sliding_window=8")
    assert named(facts, "vocab_size").origin == "the header of out"
    assert ("not verified", "sliding_window = 8 (--set sliding_window=8)") in listed(facts)
    unverified = require_verified(facts)
    assert unverified is not None and unverified.code == "fact-unverified"
    assert set(unverified.data["facts"]) == set(SETTINGS) and "--trust sliding_window" in unverified.fix
    trusted = judge(plan, stated, trust=tuple(SETTINGS))
    assert require_verified(trusted) is None
    assert ("trusted", "sliding_window = 8 (--set sliding_window=8)") in listed(trusted)


def test_a_setting_against_the_published_value_is_a_finding_unless_it_is_trusted() -> None:
    settings = {"rope_theta": 5000.0}
    plan = convert.plan_conversion("gemma", gemma_trees.published("2-2b"), settings=settings)
    (finding,) = contradictions(judge(plan, {"--set": settings}), plan)
    assert finding.got == "5000.0 (--set rope_theta=5000.0)" and finding.rule == ""
    facts = judge(plan, {"--set": settings}, trust=("rope_theta",))
    assert contradictions(facts, plan) == () and named(facts, "rope_theta").status is Status.TRUSTED
    assert any("known: 10000.0" in text for status, text in listed(facts) if status == "trusted")


def test_for_a_size_that_is_not_published_a_setting_may_differ_and_is_not_verified() -> None:
    """A small model of one's own; the rules' value of the family may not differ."""
    settings = {**SETTINGS, "rope_theta": 5000.0}
    plan = convert.plan_conversion("gemma", checkpoint("gemma2-2b"), settings=settings)
    facts = judge(plan, {"--set": settings})
    assert contradictions(facts, plan) == () and named(facts, "rope_theta").status is Status.UNVERIFIED
    assert any("rope_theta = 5000.0 (--set rope_theta=5000.0; known: 10000.0 (" in text for _, text in listed(facts))


def test_an_unknown_name_to_trust_is_an_error() -> None:
    plan = convert.plan_conversion("gemma", checkpoint("gemma2-2b"), settings=SETTINGS)
    for name, fix in (("slidingwindow", "did you mean 'sliding_window'?"), ("all", "leave it out")):
        with pytest.raises(ConvertError) as error:
            judge(plan, {}, trust=(name,))
        assert error.value.findings[0].code == "fact-unknown" and error.value.findings[0].fix == fix


def test_a_setting_that_the_tree_gives_too_is_verified() -> None:
    """A size, and the variant of a choice."""
    plan = convert.plan_conversion("gemma", gemma_trees.published("2-2b"), settings={"i": 26, "gating": "DF"})
    assert plan.confirmed == {"i", "gating"}
    assert {fact.status for fact in judge(plan, {"--set": plan.settings})} == {Status.VERIFIED}


# ---- the checkpoint's own configuration


def test_the_sidecar_confirms_what_was_not_published(tmp_path: Path) -> None:
    """A fine-tuned model has its own values; a setting against them is a finding."""
    copy = tmp_path / "ckpt"
    shutil.copytree(checkpoint("bert"), copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-6}))
    plan = convert.plan_conversion("bert", copy)
    fact = named(judge(plan, {}), "layer_norm_eps")
    assert (fact.value, fact.status) == (1e-6, Status.VERIFIED) and fact.origin == "config.json of the checkpoint"
    settings = {"layer_norm_eps": 1e-3}
    plan = convert.plan_conversion("bert", copy, settings=settings)
    (finding,) = contradictions(judge(plan, {"--set": settings}), plan)
    assert finding.expected == "1e-06 (config.json of the checkpoint)" and "put its" not in finding.fix


@pytest.mark.parametrize(
    ("rules", "case", "key", "old", "new"),
    [
        ("gpt2", "gpt2", "layer_norm_epsilon", "layer_norm_epsilon: 1e-5", "layer_norm_epsilon: 1e-6"),
        ("bert", "bert", "hidden_act", "hidden_act: gelu ", "hidden_act: gelu_new "),
        ("t5", "t5", "relative_attention_max_distance", "max_distance: 128 ", "max_distance: 64 "),
        ("whisper", "whisper", "activation_function", "activation_function: gelu\n", "activation_function: relu\n"),
    ],
)
def test_without_a_value_in_the_sidecar_the_default_of_the_class_counts(
    rules: str, case: str, key: str, old: str, new: str, tmp_path: Path
) -> None:
    copy = tmp_path / "ckpt"
    shutil.copytree(checkpoint(case), copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({name: value for name, value in config.items() if name != key}))
    plan = convert.plan_conversion(rules, copy)
    assert named(judge(plan, {}), key).status is Status.VERIFIED
    plan = planned(rules, copy, (old, new), folder=tmp_path)
    (finding,) = contradictions(judge(plan, {}), plan)
    assert finding.data["fact"] == key and "put its config.json next to the checkpoint" in finding.fix


@pytest.mark.parametrize(
    ("old", "new", "fact"),
    [
        ("decode_index: 5 ", "decode_index: 4 ", "decode_index"),
        ("rope_theta: 10000.0", "rope_theta: 1000000.0", "rope_theta"),
        ("context_length: 16384 ", "context_length: 2048 ", "context_length"),
        ("0.8, 0.9]", "0.8, 0.95]", "quantiles"),
        ("rope: half-split", "rope: interleaved", "rope"),
    ],
)
def test_wrong_facts_of_timesfm_are_findings(old: str, new: str, fact: str, tmp_path: Path) -> None:
    plan = planned("timesfm-2.5", checkpoint("timesfm-2.5"), (old, new), folder=tmp_path)
    assert [finding.data["fact"] for finding in contradictions(judge(plan, {}), plan)] == [fact]


# ---- which facts matter


def test_only_what_the_models_depend_on_must_be_verified(tmp_path: Path) -> None:
    """A formula in words, or the end of a sentence, changes no output of the model."""
    plan = convert.plan_conversion("gemma", checkpoint("gemma2-2b"), settings=SETTINGS | {"eos_token_id": [1, 9]})
    facts = judge(plan, {})
    assert named(facts, "eos_token_id").status is Status.UNVERIFIED and not named(facts, "eos_token_id").decides
    assert not named(facts, "embedding_scale").decides and named(facts, "rope_theta").decides
    assert named(judge(plan, {}, read=("embedding_scale",)), "embedding_scale").decides


def test_a_constant_of_the_target_confirms_what_was_not_published(tmp_path: Path) -> None:
    plan = convert.plan_conversion("gemma", checkpoint("gemma2-2b"), settings=SETTINGS)
    assert named(judge(plan, {}, constants=("sliding_window",)), "sliding_window").status is Status.VERIFIED


def test_what_a_reference_reads_is_known() -> None:
    facts = {"a": 1, "b": 2, "c": 3}
    read = ReadFacts(facts)
    assert read == facts and "c" in read and read.names == set()
    assert (read["a"], read.get("b"), read.get("d", 4)) == (1, 2, 4) and read.names == {"a", "b", "d"}
    for whole in (dict, lambda read: {**read}, lambda read: list(read.items())):
        read = ReadFacts(facts)
        whole(read)
        assert read.names == set(facts)


# ---- facts of layers that the target's module does not state


@pytest.mark.parametrize("agree", [True, False])
def test_where_the_outputs_agree_what_no_module_states_asks_for_nothing(agree: bool) -> None:
    layer = parse_pattern("m0")
    padding = DeclaredFact("padding", "SAME", "mine.yaml:3", layer, "conv")
    activation = DeclaredFact("activation", "gelu_erf", "mine.yaml:4", layer, "linear")
    one, two = of_layers([padding, activation], models_agree=agree)
    assert not one.open and two.open, "a comparison of the models does not decide the word of the rule"
    said = dict(reversed(listed((one, two))))  # the last one of a status
    if agree:
        assert said[BY_OUTPUTS] == f"padding of m0 ({OUTPUTS_AGREE})"
        assert [status for status, _ in listed((one, two))] == ["not verified", BY_OUTPUTS]
        of_activation = said["not verified"]
    else:
        (_, of_padding), (_, of_activation) = listed((one, two))
        assert of_padding == "padding = SAME of m0 (mine.yaml:3)"
    by_hand = "no level of the check shows it: compare the code of the two models"
    covered = "nothing to do for the file: the model level shows that both models compute the same behind the layer, and no tensor depends on this word of the rule, which is not compared with their code"
    assert of_activation == f"activation = gelu_erf of m0 (mine.yaml:4; {covered if agree else by_hand})"
    finding = require_verified((one, two))
    step = "compare the activation of the rule with the code of the two models" if agree else by_hand
    assert finding is not None and finding.fix == f"{step}, then give --trust activation"


def test_facts_that_equal_outputs_settle_are_one_line() -> None:
    """Four paddings, one after the other, each ended in words that nothing is to be done."""
    pads = [
        DeclaredFact("padding", f"F.pad(x, ({n}, 0))", "r.yaml:3", parse_pattern(f"m{n}"), "conv") for n in range(6)
    ]
    ((status, text),) = listed(of_layers(pads, models_agree=True))
    assert status == BY_OUTPUTS and text == f"padding of m0, m1, m2, m3 and 2 more ({OUTPUTS_AGREE})"
    assert text.count("nothing to do") == 1 and len(listed(of_layers(pads))) == 6


def test_a_long_value_is_cut_between_two_words() -> None:
    assert shown("F.pad(x, (2, 0)), then padding=0; or padding=(2,), and the rest is cut off") == (
        "F.pad(x, (2, 0)), then padding=0; or padding=(2,), and the ..."
    )
    assert shown("x" * 61) == "x" * 60 + " ..." and shown("a b") == "a b"
