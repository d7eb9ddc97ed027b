"""Formulas of sizes: values of keys, defaults of the class, and what is said about them."""

from __future__ import annotations

import pytest

from convert.planning.modules.formulas import Keys, keys_of

CONFIG = {"n_embd": 12, "image_size": 13, "patch_size": 4, "conv_dim": [6, 8], "id2label": {"0": "a", "1": "b", "2": "c"}, "n_inner": None}  # fmt: skip
KEYS = Keys(CONFIG, {"vocab_size": 29, "num_labels": 2, "sizes": [3, 5]}, "encoder.")


@pytest.mark.parametrize(
    ("formula", "number", "count"),
    [
        ("n_embd", "", 12),
        ("hidden_size|n_embd", "", 12),
        ("dim|vocab_size", "", 29),
        ("3*n_embd", "", 36),
        ("n_embd+2", "", 14),
        ("4*n_embd*n_embd+-4*n_embd+4", "", 532),
        ("image_size//patch_size*image_size//patch_size+1", "", 10),
        ("n_inner;4*n_embd", "", 48),
        ("conv_dim.#", "1", 8),
        ("conv_dim.#", "2", None),
        ("conv_dim.-1", "", 8),
        ("sizes.0", "", 3),
        ("vocab_size", "", 29),
        ("num_labels", "", 3),
        ("unknown", "", None),
        ("7", "", 7),
    ],
)
def test_a_formula_has_a_value(formula: str, number: str, count: int | None) -> None:
    assert KEYS.count(formula, number) == count


@pytest.mark.parametrize(
    ("formula", "said"),
    [
        ("3*hidden_size|n_embd", "has encoder.n_embd = 12"),
        ("vocab_size", "has no encoder.vocab_size, which then is 29"),
        ("n_inner;4*n_embd", "has encoder.n_embd = 12"),
        ("conv_dim.-1", "has encoder.conv_dim.-1 = 8"),
    ],
)
def test_the_values_of_the_keys_are_said(formula: str, said: str) -> None:
    assert KEYS.said(formula) == said


def test_keys_are_those_of_all_terms() -> None:
    assert keys_of("4*a*b//c+-2*a|d+1") == ("a", "b", "c", "a|d")


def test_a_part_of_a_list_may_have_several_names() -> None:
    assert Keys({"vision_config": {"hidden_size": 14}}).count("vision_config.hidden_size|dim") == 14
