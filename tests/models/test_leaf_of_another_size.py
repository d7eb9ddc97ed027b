"""One leaf, or one letter in all leaves, of another size, and layers that are missing: refused, or the class of the target has such a tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import convert
from convert.planning.plan import Plan
from support import gemma_drawn, gemma_towers, maxtext
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly, checkpoint
from support.other_sizes import with_size
from support.paths import GOLDEN

pytestmark = pytest.mark.slow

Specs = dict[str, tuple[tuple[int, ...], str]]
LAYER = re.compile(r"layers?_(\d+)/")
CASES = (
    *(f"gemma4/{case}" for case in ("gemma4-31b", "gemma4-26b-a4b", "gemma4-e2b")),
    "gemma4-towers/gemma4-e2b",
    *(f"maxtext/{case}" for case in ("gemma4", "gemma4-e", "deepseek4", "deepseek4-scanned")),
    "scenic/owlvit",
    "siglip/ckpt",
)


def opened(case: str) -> tuple[str, Specs, dict[str, Any]]:
    """Return the family of a golden, its tree, and what a user must say of it."""
    folder, _, name = case.partition("/")
    if folder == "timesfm-2.5":
        source = convert.open_source(checkpoint(folder))
        return "timesfm", {leaf: (x.spec.shape, x.spec.dtype) for leaf, x in source.leaves.items()}, {}
    if folder in ("maxtext", "siglip"):
        source = convert.open_source(maxtext.checkpoint(name) if folder == "maxtext" else GOLDEN / f"{case}.npz")
        family, said = (maxtext.rules(name), maxtext.settings(name)) if folder == "maxtext" else ("siglip", {})
        return family, {leaf: (x.spec.shape, x.spec.dtype) for leaf, x in source.leaves.items()}, said
    specs: Specs = {leaf: (shape, "float32") for leaf, shape in DrawnCases(GOLDEN / folder).shapes(name).items()}
    if folder == "t5x":
        return name, specs, {}
    if folder == "scenic":
        return "owl-vit", specs, {"image_size": 20}
    return "gemma", specs, (gemma_towers if folder == "gemma4-towers" else gemma_drawn).settings(name)


def unlike_the_class(plan: Plan) -> set[str]:
    """Return the tensors of a plan that have another shape in the class which `config.json` names, or are not in it."""
    import transformers

    assert plan.config is not None
    config = transformers.AutoConfig.for_model(**plan.config)
    with torch.device("meta"):
        made = getattr(transformers, plan.config["architectures"][0])(config).state_dict()
    return {step.name for step in plan.steps if step.name not in made or made[step.name].shape != step.spec.shape}


def changed(specs: Specs) -> Iterator[tuple[str, Specs]]:
    """Yield trees in which one leaf is longer in one axis, or has one more, in layers of each kind."""
    text = re.compile("layer_|embedder/in|final") if any(name.startswith("audio") for name in specs) else None
    last = max((int(found[1]) for name in specs if (found := LAYER.search(name))), default=0)
    for name, (shape, dtype) in specs.items():
        if (found := LAYER.search(name)) and int(found[1]) not in (0, 1, last):
            continue
        if text is not None and text.match(name):
            continue  # of the language model, which has its own case
        longer = [(*shape[:k], size + 1, *shape[k + 1 :]) for k, size in enumerate(shape)]
        for other in longer or [(2,)]:
            yield f"{name} {shape} -> {other}", {**specs, name: (other, dtype)}


@pytest.mark.parametrize("case", CASES)
def test_a_leaf_that_the_class_does_not_take_is_refused(case: str) -> None:
    family, specs, said = opened(case)
    right = convert.plan_conversion(family, SpecsOnly(specs), settings=said)
    model, renamed = right.rules.model, unlike_the_class(right)  # of experts: transformers stacks them as it loads
    wrong, refused = {}, 0
    for name, tree in changed(specs):
        try:
            plan = convert.plan_conversion(model, SpecsOnly(tree), settings=said)
        except convert.PlanError:
            refused += 1
            continue
        if others := unlike_the_class(plan) - renamed:
            wrong[name] = others
    assert refused and not wrong


LETTERS = (
    *CASES,
    "t5x/pix2struct",
    "timesfm-2.5",
    *(f"maxtext/{case}" for case in ("qwen3-next", "qwen3.5-vision", "qwen3-vl", "qwen3-omni", "deepseek3", "gpt-oss")),
)


def of_letters(plan: Plan, specs: Specs) -> Iterator[tuple[str, Specs]]:
    """Yield trees in which all axes with one letter have another size, where it has one."""
    shapes = {name: shape for name, (shape, _) in specs.items()}
    stored = {axis for step in plan.steps for part in step.parts for axis in part.stored}
    for letter in sorted({name for name, _ in stored if len(name) == 1}):
        sizes = {size for name, size in stored if name == letter}
        for other in {max(sizes) + 1, 2 * max(sizes), max(max(sizes) // 2, 1)} - sizes if len(sizes) == 1 else ():
            tree = with_size(plan, shapes, letter, other)
            yield f"{letter}: {sizes} -> {other}", {name: (tree[name], dtype) for name, (_, dtype) in specs.items()}


@pytest.mark.parametrize("case", LETTERS)
def test_a_letter_of_a_size_that_the_class_does_not_take_is_refused(case: str) -> None:
    """The leaves agree with one another."""
    family, specs, said = opened(case)
    right = convert.plan_conversion(family, SpecsOnly(specs), settings=said, to="transformers")
    model, wrong = right.rules.model, {}
    renamed = {re.sub(r"\d+", "", one) for one in unlike_the_class(right)}  # there may be more experts
    for name, tree in of_letters(right, specs):
        try:
            plan = convert.plan_conversion(model, SpecsOnly(tree), settings=said, to="transformers")
        except convert.PlanError:
            continue
        if others := {one for one in unlike_the_class(plan) if re.sub(r"\d+", "", one) not in renamed}:
            wrong[name] = others
    assert not wrong


@pytest.mark.parametrize(
    ("case", "kept", "expected"),
    [
        ("gemma4/gemma4-31b", (0, 1, 2), "with full_attention at the end"),
        ("gemma4/gemma4-26b-a4b", (0, 1, 2), "with full_attention at the end"),
        ("gemma4/gemma4-31b", (1, 2, 3), "with sliding_attention at the start"),
    ],
)
def test_a_tree_without_its_first_or_last_layer_is_refused(case: str, kept: tuple[int, ...], expected: str) -> None:
    """The class has a global layer at the end in any case, and its config one width for all local heads."""
    family, specs, said = opened(case)
    tree = {name: x for name, x in specs.items() if not LAYER.search(name)}
    for k, layer in enumerate(kept):
        tree |= {LAYER.sub(f"layer_{k}/", name): x for name, x in specs.items() if f"layer_{layer}/" in name}
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(family, SpecsOnly(tree), settings=said)
    (finding,) = refused.value.findings
    assert expected in finding.expected and "by the leaves of its layers" in finding.got and "layers" in finding.fix


@pytest.mark.parametrize(("version", "case"), [("4-e2b", "gemma4-e2b"), ("4-31b", "gemma4-31b")])
def test_a_published_size_with_another_width_in_one_layer_is_refused(version: str, case: str) -> None:
    """Nobody stated the pattern: the version has it, and the tree contradicts it."""
    source = gemma_drawn.published(version)
    specs = {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in source.leaves.items()}
    F, wide = gemma_drawn.SIZES[version][1]["F"], "layer_3/"
    for words in ({F: F + 1}, {256: 512}):
        tree = {
            name: (tuple(words.get(size, size) for size in shape) if name.startswith(wide) else shape, dtype)
            for name, (shape, dtype) in specs.items()
        }
        assert tree != specs
        with pytest.raises(convert.PlanError):
            convert.plan_conversion("gemma", SpecsOnly(tree))
