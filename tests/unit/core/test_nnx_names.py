"""The key ``value`` of flax nnx is left out of a leaf's name; a model's own leaf of this name keeps it."""

from __future__ import annotations

from convert.core.nnx_names import without_value


def test_the_key_of_nnx_is_left_out() -> None:
    assert without_value(["a/kernel/value", "a/bias/value", "0/value"]) == {
        "a/kernel/value": "a/kernel",
        "a/bias/value": "a/bias",
        "0/value": "0",
    }


def test_a_leaf_with_others_beside_it_keeps_its_name() -> None:
    names = ["att/key", "att/value", "att/value_bias", "value", "b/value/kernel", "b/value/bias"]
    assert without_value(names) == {name: name for name in names}


def test_nnx_variables_within_a_module_called_value() -> None:
    names = ["att/value/kernel/value", "att/value/bias/value"]
    assert list(without_value(names).values()) == ["att/value/kernel", "att/value/bias"]
