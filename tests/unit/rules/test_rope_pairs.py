"""Every family with RoPE refuses heads of which no pairs can be made: a file that does not say so fails here."""

from __future__ import annotations

from dataclasses import replace

from convert.rules.file import RuleFile
from convert.rules.library import available_rules

PAIRS = ("pairs of features that RoPE turns", "frequencies of RoPE")  # the meaning of an axis


def turns(rules: RuleFile) -> bool:
    """Whether a model has RoPE, by the names of its facts and by its rules."""
    return any(rule.rope for rule in rules.rules) or any(name.startswith("rope") for name in rules.facts)


def says_so(rules: RuleFile) -> bool:
    """Whether a rule, a formula, a product or a limit has pairs."""
    pairs = {letter for letter, axis in rules.axes.items() if axis.meaning.startswith(PAIRS)}
    parts = dict(allowed.bounds) if (allowed := rules.allowed.get("qk_rope_head_dim")) else {}
    return (
        any(rule.rope for rule in rules.rules)
        or any(formula.letter in pairs for formula in rules.formulas)
        or any(axis.equals[:1] == (2,) and pairs & {*axis.equals} for axis in rules.axes.values())
        or ("multiple_of" in parts and parts["multiple_of"].text == "2")
    )


def test_every_family_with_rope_has_pairs() -> None:
    models = [rules for rules in available_rules() if turns(rules)]
    assert len(models) > 60 and not [rules.model for rules in models if not says_so(rules)]


def test_a_family_that_does_not_say_so_is_found() -> None:
    """The planted faults: no formula, no limit, no key of a rule."""
    rules = {one.model: one for one in available_rules()}
    for one in (
        replace(rules["gemma3"], formulas=()),
        replace(rules["llama_lm"], formulas=()),
        replace(rules["maxtext-deepseek2"], allowed={}),
        replace(rules["keras-llama"], rules=tuple(replace(x, rope=None) for x in rules["keras-llama"].rules)),
    ):
        assert turns(one) and not says_so(one)
