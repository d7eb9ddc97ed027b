"""Each setting of each shipped family has values that no model can have, and these are refused: a family without `allowed` fails here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from convert.planning.facts.settings import _descriptive_facts, expected_fact
from convert.rules.allowed import Known, is_number
from convert.rules.file import ASK, RuleFile
from convert.rules.library import available_rules, shipped_rules_dir
from convert.rules.parse import parse_models

SIZE, HUGE = 12, 10**9
# What may be larger than any number that is written here; why:
UNBOUNDED = {
    # lengths and distances beyond all that the model reads: it then computes as without them
    "context_length", "sliding_window", "sliding_window_size", "attention_window", "local_radius", "tokens_per_block", "expert_capacity",
    "tokens_attended", "action_horizon", "action_dim", "rope_original_length", "rope_pretraining_sequence_length", "positions_per_second",
    "relative_attention_max_distance", "image_size",
    # RoPE's base and its stretching: any number above is another rotation
    "rope_theta", "rope_theta_local", "rope_theta_global", "rope_theta_text", "rope_theta_vision", "compressed_rope_theta",
    "rope_max_wavelength", "min_timescale", "max_timescale", "rope_factor", "rope_factor_global", "rope_frequency_adjustment_factor",
    "rope_low_freq_factor", "rope_high_freq_factor", "rope_mscale",
    # caps that cap nothing, and factors
    "attn_logit_softcapping", "final_logit_softcapping", "attention_logit_soft_cap", "final_logit_soft_cap", "logits_soft_cap",
    "coefficient_clip", "swiglu_limit", "query_pre_attn_scalar", "routed_scaling_factor", "layerscale_value", "decay", "min_std",
    "pad_value", "tolerance",
    "vocab_size",  # compared with the rows of the table when the rules are compiled
}  # fmt: skip
# transformers' classes of Gemma 3 and PaliGemma replace the id of an image before they look it up, so that it may lie outside of the table
OUTSIDE_OF_THE_TABLE = {"gemma3_vision", "maxtext-gemma3-vision", "paligemma1", "paligemma2", "pi0", "pi05", "pi0-fast"}
FROM_ZERO = ("_token", "_token_id")  # the end of the name of a token's id
ZERO = {"kv_shared_layers", "decode_index", "pad_value"}
NEGATIVE = {"pad_value"}  # TimesFM's number for a missing value
NAMES = {"policy_obs_key", "value_obs_key"}  # of observations, as the environment calls them


def tried(rules: RuleFile, name: str) -> Iterator[Any]:
    """Yield values that no model can have for a setting."""
    if name not in NEGATIVE:
        yield -1
    if not name.endswith(FROM_ZERO) and name not in ZERO:
        yield 0
    if name not in UNBOUNDED and not (name == "image_token" and rules.model in OUTSIDE_OF_THE_TABLE):
        yield HUGE
    if name not in NAMES:
        yield "nonsense"
    yield from ([], [1.5] * 7, {"a": 1}, float("nan"), float("inf"))


def decided_by_the_tree(rules: RuleFile, name: str) -> bool:
    """Whether a product or formula is a size that the leaves show."""
    return any(name in one.names for one in (*rules.products, *rules.formulas))


def refused(rules: RuleFile, name: str, value: Any) -> bool:
    """Whether planning refuses a value, for a tree in which each axis has the same size."""
    known = {name: one for name, one in rules.facts.items() if one != ASK}
    sizes = dict.fromkeys(rules.axes, SIZE) | {f"{letter}[{end}]": SIZE for letter in rules.axes for end in (0, -1)}
    if expected_fact(rules, name, value):
        return True
    if (allowed := rules.allowed.get(name)) and allowed.refuses(value, Known({**known, **sizes})):
        return True
    if any(target.requires[name].value != value for target in rules.targets.values() if name in target.requires):
        return True
    listed = [rule.fact_values[name] for rule in rules.rules if name in rule.fact_values]
    if listed and not any(value in words for words in listed):
        return True
    return decided_by_the_tree(rules, name) and (not is_number(value) or value <= 0 or value == HUGE)


def test_no_family_takes_what_no_model_can_have() -> None:
    accepted = {
        f"{rules.model}: {name}={value!r}"
        for rules in available_rules()
        for name in rules.facts.keys() - _descriptive_facts(rules)
        for value in tried(rules, name)
        if not refused(rules, name, value)
    }
    assert not accepted, "state in `allowed` of the rules what the setting may be:\n" + "\n".join(sorted(accepted))


@pytest.mark.parametrize(("stated", "left"), [("  experts_per_token: {is: integer, at_least: 1, at_most: E}\n", ""), (", at_most: E", ""), ("at_least: 1, at_most: E", "at_most: E")])  # fmt: skip
def test_a_family_without_a_bound_is_found(stated: str, left: str) -> None:
    text = (shipped_rules_dir() / "maxtext.yaml").read_text()
    assert stated in text
    models = parse_models(text.replace(stated, left, 1), "maxtext.yaml")
    rules = next(one for one in models if one.model == "maxtext-mixtral")
    assert any(not refused(rules, "experts_per_token", value) for value in tried(rules, "experts_per_token"))
