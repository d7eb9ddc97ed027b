"""LoRA pairs beside every linear weight of every golden: no family has a rule for them, and none is converted without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.checkpoints import Source
from convert.core.einsum import Projection
from convert.peft.plan import plan_adapter
from convert.planning.plan import Plan
from convert.reversing.source import ReversedSource
from models.test_reverse_models import GOLDENS
from support import flax_families, gemma_drawn, gemma_towers, keras_hub, owl_vit, tips, videoprism, vit
from support.goldens import relative_error
from support.memory_source import MemorySource, run

pytestmark = pytest.mark.slow

RANK, ALPHA = 2, 4.0
BACK = (*("timesfm-1.0", "gemma2-2b", "gemma3-stacked", "paligemma2", "siglip", "recurrentgemma", "gpt2", "t5x-umt5"), *("whisper", "vit", "maxtext-gemma3", "maxtext-deepseek3", "maxtext-gpt-oss"))  # fmt: skip
CASES = [pytest.param(*one, id=one[1]) for one in GOLDENS]
BACK_IDS = [one[1] for one in GOLDENS if one[1] in BACK]
Tree = dict[str, np.ndarray]


def linear_leaves(plan: Plan) -> dict[str, tuple[Projection, tuple[int, ...]]]:
    """The weights that the plan uses in an equation, and their stacked axes; none that it makes of several leaves."""
    found = {}
    for step in plan.steps:
        for part in step.parts:
            rule = part.rule
            if (
                step.role == "weight"
                and rule is not None
                and rule.normalized is None
                and rule.kind.pair is None
                and part.leaf not in plan.merges
            ):
                equation = rule.kind.linear_map(plan.choices.get(rule.choice or ""))
                if equation is not None:
                    found[part.leaf] = (equation, tuple(sorted(rule.stacked.values())))
    return found


def with_pairs(tree: Tree, plan: Plan, rng: np.random.Generator) -> tuple[Tree, Tree, int]:
    """The tree with the pairs of qwix's einsum; the same tree with the products added, by `numpy.einsum`; and their number."""
    adapted, merged = dict(tree), dict(tree)
    leaves = linear_leaves(plan)
    for name, (equation, stacked) in leaves.items():
        letters, weight = list(equation.weight), tree[name]
        for axis in stacked:
            letters.insert(axis, f"{axis}")
        names = {letter: chr(ord("a") + k) for k, letter in enumerate(letters)}
        first = [x for x in letters if x.isdecimal() or x in equation.inputs + equation.batch]
        second = [x for x in letters if x.isdecimal() or x in equation.outputs]
        size = dict(zip(letters, weight.shape, strict=True))
        own = [[x for x in each if not x.isdecimal()] for each in (first, second)]
        axes = [[*own[0], "rank"], ["rank", *own[1]]]  # no letter: a rule may have each
        for each in axes:  # stacked where the weight is
            for axis in stacked:
                each.insert(axis, f"{axis}")
        pair = [rng.standard_normal([RANK if x == "rank" else size[x] for x in each]) / 8 for each in axes]
        stem, end = name.removesuffix("/value"), "/value" * name.endswith("/value")
        for leaf, word in zip(pair, "ab", strict=True):
            adapted[f"{stem}_lora_{word}{end}"] = leaf.astype(weight.dtype)
        a, b = (leaf.astype(weight.dtype).astype(np.float64) for leaf in pair)
        spelled = ["".join(names.get(x, "z") for x in each) for each in axes]
        product = np.einsum(f"{spelled[0]},{spelled[1]}->{''.join(names.values())}", a, b)
        merged[name] = (weight.astype(np.float64) + ALPHA / RANK * product).astype(weight.dtype)
    return adapted, merged, len(leaves)


@pytest.mark.parametrize("case", flax_families.GENERIC)
def test_a_flax_class_of_transformers_finds_its_adapters(case: str, tmp_path: Path) -> None:
    """Its rule file drops the leaves that no other rule matches."""
    ckpt = flax_families.write(case, tmp_path / "source")
    test_a_family_finds_its_adapters("flax_transformers", case, ckpt, {}, tmp_path)


WRITTEN = [  # the families whose goldens the tests write
    *(("gemma", case, gemma_drawn.write, gemma_drawn.settings(case)) for case in gemma_drawn.CASES),
    *(("gemma", case, gemma_towers.write, gemma_towers.settings(case)) for case in ("gemma4-31b", "gemma4-e2b")),
    *(("videoprism", case, videoprism.write, videoprism.SET) for case in videoprism.CASES),
    *(("tips", case, tips.write, {}) for case in tips.ALL.names),
    *(("owl-vit", case, owl_vit.write, owl_vit.settings(case)) for case in owl_vit.CASES),
    *(("vit-jax", case, vit.write, vit.settings(case)) for case in vit.CASES),
    *(("keras-hub", case, keras_hub.checkpoint, keras_hub.settings(case)) for case in keras_hub.CASES),
    *(("flax-transformers", case, flax_families.write, {}) for case in ("llama.biased", "gemma.biased")),
]


@pytest.mark.parametrize(("model", "case", "write", "said"), WRITTEN)
def test_every_other_family_finds_its_adapters(
    model: str, case: str, write: Callable[[str, Path], Path], said: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    test_a_family_finds_its_adapters(model, case, write(case, folder), said, tmp_path)


def beside(source: Source, arrays: Tree) -> MemorySource:
    """Return a checkpoint of these arrays, with the files beside the source, such as config.json."""
    memory = MemorySource(arrays)
    memory.path = source.path
    return memory


@pytest.mark.parametrize(("model", "case", "at", "said"), CASES)
def test_a_family_finds_its_adapters(
    model: str, case: str, at: Path | Callable[[Path], Path], said: dict[str, Any], tmp_path: Path
) -> None:
    source = convert.open_source(at if isinstance(at, Path) else at(tmp_path))
    tree = {name: source.read(name) for name in source.leaves}

    opened = partial(beside, source)
    base = convert.plan_conversion(model, opened(tree), settings=said)
    adapted, merged, count = with_pairs(tree, base, np.random.default_rng(0))
    plan = convert.plan_conversion(model, opened(adapted), settings={**said, "lora_alpha": ALPHA})
    assert count > 1 and len(plan.merges) - len(base.merges) == count
    assert {drop.leaf for drop in plan.dropped} == {drop.leaf for drop in base.dropped}
    got, want = run(plan), run(convert.plan_conversion(model, opened(merged), settings=said))
    without = run(base)
    assert got.keys() == want.keys() == without.keys()
    for name, value in want.items():
        if np.array_equal(value, without[name]):
            assert np.array_equal(got[name], value), name
        else:
            assert relative_error(got[name], value.astype(np.float64)) < 5e-7, name
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(model, opened(adapted), settings=said)
    assert "adapter-scale-unknown" in {finding.code for finding in refused.value.findings}


@pytest.mark.parametrize(("model", "case", "at", "said"), [one for one in GOLDENS if one[1] in BACK], ids=BACK_IDS)
def test_an_adapter_of_a_family_comes_back(
    model: str, case: str, at: Path | Callable[[Path], Path], said: dict[str, Any], tmp_path: Path
) -> None:
    """JAX -> PEFT -> JAX -> PEFT: the same leaves and the same file. Pairs of tensors that are no module's weight are left out."""
    source = convert.open_source(at if isinstance(at, Path) else at(tmp_path))
    tree = {name: source.read(name) for name in source.leaves}

    opened = partial(beside, source)
    adapted, _, _ = with_pairs(tree, convert.plan_conversion(model, opened(tree), settings=said), np.random.default_rng(0))  # fmt: skip
    said = {**said, "lora_alpha": ALPHA}
    plan = convert.plan_conversion(model, opened(adapted), settings=said)
    try:
        plan_adapter(plan)
    except convert.PlanError as error:
        assert {finding.code for finding in error.findings} == {"adapter-not-exportable"}
        names = {finding.path for finding in error.findings}
        merges = [plan.merges[part.leaf] for step in plan.steps if step.name in names for part in step.parts if part.leaf in plan.merges]  # fmt: skip
        adapted = {name: x for name, x in adapted.items() if not any(name in (m.first, m.second) for m in merges)}
    first, again = tmp_path / "first", tmp_path / "again"
    convert.convert_adapter(model, opened(adapted), first, settings=said)
    back = ReversedSource(convert.plan_reverse(model, first, like=opened(adapted), settings=said))
    assert set(back.leaves) == set(adapted)
    assert [name for name, x in adapted.items() if back.read(name).tobytes() != x.tobytes()] == []
    convert.convert_adapter(model, back, again, settings=said)
    assert all(file.read_bytes() == (again / file.name).read_bytes() for file in first.iterdir())
