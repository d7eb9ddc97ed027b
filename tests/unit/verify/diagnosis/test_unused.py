"""Tensors that the target never uses are named by the modules that hold no others."""

from __future__ import annotations

from convert.verify.diagnosis.unused import _modules

EVERY = ["embed.weight", "blocks.0.q.weight", "blocks.1.q.weight", "blocks.1.q.bias", "blocks.1.v.weight", "types"]


def test_a_module_is_named_in_the_place_of_its_tensors() -> None:
    assert list(_modules({"types", *(x for x in EVERY if x.startswith("blocks.1."))}, EVERY)) == [
        "blocks.1 (3 tensors)",
        "types",
    ]


def test_a_module_of_which_something_is_used_is_not_named() -> None:
    assert list(_modules({"blocks.1.q.weight", "blocks.1.q.bias"}, EVERY)) == ["blocks.1.q (2 tensors)"]
    assert list(_modules({"blocks.1.q.weight", "blocks.1.v.weight"}, EVERY)) == [
        "blocks.1.q.weight",
        "blocks.1.v.weight",
    ]
