"""LoRA pairs of another checkpoint beside the weights of this one: which names they get, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from convert.checkpoints.chunks import full_box
from convert.planning.adapters.joined import joined
from support.memory_source import MemorySource, rule_file

RULES = rule_file('- {einsum: "...D,DF->...F", from: up/kernel, linear: up}')


def tree(*names: str) -> MemorySource:
    return MemorySource({name: np.full((2, 2), k, "float32") for k, name in enumerate(names, 1)})


def made(base: tuple[str, ...], adapter: tuple[str, ...]) -> list[str]:
    return [name for name in joined(tree(*base), tree(*adapter)).leaves if name not in base]


@pytest.mark.parametrize(
    ("base", "adapter", "names"),
    [
        ("up/kernel", "up/kernel", "up/kernel"),
        ("up/kernel/value", "up/kernel/value", "up/kernel/value"),
        ("params/params/up/kernel", "params/params/up/kernel", "params/params/up/kernel"),
        ("params/params/up/kernel", "params/up/kernel", "params/params/up/kernel"),
        ("params/up/kernel", "params/params/up/kernel", "params/up/kernel"),
        ("base/up/kernel/value", "up/kernel", "base/up/kernel/value"),
        ("up/kernel", "params/params/up/kernel/value", "up/kernel"),
        ("model_params/up/kernel", "params/up/kernel", "model_params/up/kernel"),
    ],
)
def test_the_first_keys_of_the_two_trees_may_differ(base: str, adapter: str, names: str) -> None:
    def pair(weight: str) -> tuple[str, ...]:
        stem, end = weight.removesuffix("/value"), "/value" * weight.endswith("/value")
        return tuple(f"{stem}_lora_{x}{end}" for x in "ab")

    assert made((base,), pair(adapter)) == list(pair(names))


def test_the_tree_of_the_weights_comes_before_the_moments_of_the_optimizer() -> None:
    weights = ("opt_state/mu/params/up/kernel", "params/down/kernel", "params/up/kernel")
    pairs = tuple(f"{place}/kernel_lora_{x}" for place in ("up", "down") for x in "ab")
    assert made(weights, pairs) == [f"params/{name}" for name in pairs]


@pytest.mark.parametrize(
    ("base", "adapter", "expected"),
    [
        ("{x}/up/kernel", "up", None),
        ("{x}/up/kernel", "model/up", None),
        ("params/{x}/up/kernel", "base/decoder/up", "params/decoder/up/kernel"),
        ("{x}/up/kernel", "decoder/up", "decoder/up/kernel"),
    ],
)
def test_pairs_of_one_of_two_towers(base: str, adapter: str, expected: str | None) -> None:
    """An encoder and a decoder have the same layers: where the keys do not say whose the pairs are, they are in neither."""
    weights = [base.replace("{x}", tower) for tower in ("encoder", "decoder")]
    source = joined(tree(*weights), tree(*(f"{adapter}/kernel_lora_{end}" for end in "ab")))
    rule = f'- {{einsum: "...D,DF->...F", from: "{base.replace("{x}", "{encoder,decoder}")}", linear: "{{encoder,decoder}}"}}'
    if expected is None:
        with pytest.raises(convert.PlanError, match="do not say to which part") as refused:
            convert.plan_conversion(rule_file(rule), source, settings={"lora_alpha": 4})
        assert refused.value.code == "adapter-not-joined"
    else:
        plan = convert.plan_conversion(rule_file(rule), source, settings={"lora_alpha": 4})
        assert [name.split()[0] for name in plan.merges] == [expected]


def test_moments_are_no_second_place() -> None:
    weights = ("opt_state/mu/up/kernel", "opt_state/nu/up/kernel", "params/up/kernel")
    source = joined(tree(*weights), tree("up/kernel_lora_a", "up/kernel_lora_b"))
    rules = rule_file(
        '- {einsum: "...D,DF->...F", from: params/up/kernel, linear: up}\n- {drop: /opt_state/**, because: moments}'
    )
    plan = convert.plan_conversion(rules, source, settings={"lora_alpha": 4})
    assert [name.split()[0] for name in plan.merges] == ["params/up/kernel"]


def test_values_step_and_files_are_those_of_both() -> None:
    adapter = tree("up/kernel_lora_a", "up/kernel_lora_b", "step")
    base = tree("up/kernel")
    base.watched, adapter.watched = {Path("a"): None}, {Path("b"): None}
    source = joined(base, adapter)
    assert list(source.leaves) == ["up/kernel", "up/kernel_lora_a", "up/kernel_lora_b"]
    assert source.parts == (source, adapter) and set(source.watched) == {Path("a"), Path("b")}
    for name, value in (("up/kernel", 1), ("up/kernel_lora_a", 1), ("up/kernel_lora_b", 2)):
        box = full_box((2, 2))
        ((_, piece),) = source.pieces(name, box)
        assert (
            (source.read(name) == value).all()
            and (source.read_box(name, box) == value).all()
            and (piece == value).all()
        )
    plan = convert.plan_conversion(RULES, base, lora=None)
    assert not plan.merges
    assert convert.plan_conversion(RULES, source, settings={"lora_alpha": 4}).merges


@pytest.mark.parametrize(
    ("base", "adapter", "problem"),
    [
        (("up/kernel",), ("up/kernel",), "has no LoRA pair"),
        (("up/kernel",), ("up/kernel", "up/kernel_lora_a", "up/kernel_lora_b"), "weights beside the LoRA pairs"),
        (("up/kernel", "up/kernel_lora_a"), ("up/kernel_lora_a", "up/kernel_lora_b"), "has LoRA pairs itself"),
        (("up/kernel",), ("down/kernel_lora_a", "down/kernel_lora_b"), "belong to no weights"),
        (("up/kernel",), ("up/kernel_lora_b",), "belong to no weights"),
    ],
)
def test_what_is_refused(base: tuple[str, ...], adapter: tuple[str, ...], problem: str) -> None:
    with pytest.raises(convert.PlanError) as refused:
        joined(tree(*base), tree(*adapter))
    (finding,) = refused.value.findings
    assert finding.code == "adapter-not-joined" and problem in finding.problem


def test_a_pair_without_its_weight_is_refused() -> None:
    names = [f"{place}/kernel_lora_{x}" for place in ("up", "gone") for x in "ab"]
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(RULES, joined(tree("up/kernel"), tree(*names)), settings={"lora_alpha": 4})
    assert {finding.path for finding in refused.value.findings} >= {"gone/kernel_lora_a", "gone/kernel_lora_b"}
