"""Every family whose query heads share key heads says so: a file without `divides` fails here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from convert.rules.file import RuleFile
from convert.rules.library import available_rules

HEADS, KEYS = re.compile("(^|_)num_attention_heads$"), re.compile("num_(global_)?key_value_heads$")
OF_KEYS = re.compile("^key (and value )?heads")  # the meaning of an axis


def grouped(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a configuration has for the query heads, and for the key heads beside them."""
    heads = [value for key, value in config.items() if HEADS.search(key)]
    keys = [value for key, value in config.items() if KEYS.search(key)]
    yield from ((str(one), str(other)) for one in heads for other in keys)
    for value in config.values():
        if isinstance(value, dict):
            yield from grouped(value)


def unsaid(rules: RuleFile) -> Iterator[str]:
    """Yield the key heads of a model that may be any number."""
    for target in rules.targets.values():
        for heads, keys in grouped(target.config):
            if heads == keys or not keys.startswith("$"):
                continue
            axis, allowed = rules.axes.get(keys[1:]), rules.allowed.get(keys[1:])
            divides = axis.divides if axis else dict(allowed.bounds)["divides"].text if allowed else ""
            if f"${divides}" != heads:
                yield f"{rules.model}: {keys} beside {heads}"
    for letter, axis in rules.axes.items():
        if OF_KEYS.search(axis.meaning) and not (axis.divides or axis.equals):
            yield f"{rules.model}: {letter} ({axis.meaning})"


def test_every_family_with_grouped_queries_says_that_they_share_the_key_heads() -> None:
    assert not [one for rules in available_rules() for one in unsaid(rules)]
    assert sum(bool(axis.divides) for rules in available_rules() for axis in rules.axes.values()) > 40


def test_a_family_that_does_not_say_so_is_found() -> None:
    """The planted faults: the word is missing in the axes, and in the limits of a fact."""
    rules = {one.model: one for one in available_rules()}
    told, stated = rules["gemma2"], rules["llama_lm"]
    axes = {letter: replace(axis, divides="") for letter, axis in told.axes.items()}
    assert [*unsaid(replace(told, axes=axes))] == ["gemma2: $K beside $N", "gemma2: K (key and value heads)"]
    assert [*unsaid(replace(stated, allowed={}))] == ["llama_lm: $num_key_value_heads beside $num_attention_heads"]
