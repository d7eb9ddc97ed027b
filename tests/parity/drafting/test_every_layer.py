"""Every layer of the libraries, drafted from what it saves: with truthful answers the draft gives what torch computes the same with.

A draft that decides what a tree does not tell is wrong for one of two layers whose trees are alike.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from convert import PlanError, draft_rules, parse_rules, plan_conversion
from convert.planning.matching.match import cover
from convert.planning.planner import make_plan
from support.layer_table.base import Case, Live, told, torch_output
from support.memory_source import MemorySource, run

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
pytest.importorskip("jax")
pytest.importorskip("torch")


def draft_answered(case: Case, live: Live) -> dict[str, np.ndarray]:
    text = draft_rules(live.source)
    draft = parse_rules(text, "draft.yaml")
    coverage = cover(draft, live.source)
    assert not coverage.findings and coverage.claimed == len(live.source.leaves)
    with pytest.raises(PlanError) as still_open:
        make_plan(draft, live.source)
    assert [*still_open.value.findings] == [question.finding for question in draft.questions]
    try:
        rules = parse_rules(told(text, case.answers, case.more))
        assert not rules.questions
        return run(plan_conversion(rules, live.source))
    except BaseException as error:
        error.add_note(text[text.index("rules:") :])
        raise


LIBRARIES = [name for name in ("linen", "nnx", "equinox", "keras", "haiku") if importlib.util.find_spec({"linen": "flax", "nnx": "flax"}.get(name, name))]  # fmt: skip


@lru_cache
def live(library: str, what: str) -> Live:
    """What a layer saved and computed; once for all its names."""
    import jax

    module = importlib.import_module(f"support.layer_table.{library}")
    with jax.disable_jit(), TemporaryDirectory() as folder:
        found: Live = module.save(module.CASES[what], Path(folder))
        arrays = {name: np.asarray(found.source.read(name)) for name in found.source.leaves}
    return Live(MemorySource(arrays), found.y)


def rows() -> list[Any]:
    """All layers; every tenth runs by default."""
    found: list[Any] = []
    for library in LIBRARIES:
        module = importlib.import_module(f"support.layer_table.{library}")
        for what, case in module.CASES.items():
            for name in ("", "up") if hasattr(module, "renamed") and not case.named else ("",):
                marks = [pytest.mark.slow] if len(found) % 10 else []
                found.append(
                    pytest.param(library, what, name, id=f"{library} {what}{' as ' * bool(name)}{name}", marks=marks)
                )
    return found


@pytest.mark.parametrize(("library", "what", "name"), rows())
def test_a_layer_drafted_and_answered_computes_the_same(library: str, what: str, name: str) -> None:
    """Under the name that its class gives it, and under one that tells nothing."""
    module = importlib.import_module(f"support.layer_table.{library}")
    case, found = module.CASES[what], live(library, what)
    if name:
        arrays = {module.renamed(path, name): found.source.read(path) for path in found.source.leaves}
        assert arrays.keys() != found.source.leaves.keys()
        found = Live(MemorySource(arrays), found.y)
    made = draft_answered(case, found)
    np.testing.assert_allclose(torch_output(case, made), found.y, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("library", "what", "line"),
    [
        ("linen", "ConvTranspose 2d, in = out, turned by JAX", "transpose_kernel: true"),
        ("nnx", "SpectralNorm of a square Linear", "spectral_norm: "),
        ("nnx", "WeightNorm of Linear", "weight_norm: "),
        ("equinox", "SpectralNorm of a square Linear", "spectral_norm: "),
        ("keras", "Conv2DTranspose, in = out", "transpose_kernel: true"),
    ],
)
def test_the_table_sees_a_line_that_is_missing(library: str, what: str, line: str) -> None:
    """Without it the tensors fit, with ``strict=True``, and compute something else."""
    case, found = importlib.import_module(f"support.layer_table.{library}").CASES[what], live(library, what)
    whole = told(draft_rules(found.source), case.answers, case.more)
    assert whole.count(line) == 1
    path = re.search(rf"{line}(.+)", whole)
    left = re.findall(r"[uv]: ([^,}]+)", path[1]) or [path[1]] if path and line.endswith(": ") else []
    drop = "".join(f"\n- drop: {one}\n  because: a fault" for one in left)
    faulty = "\n".join(x for x in whole.splitlines() if line not in x) + drop
    made = run(plan_conversion(parse_rules(faulty), found.source))
    assert np.abs(torch_output(case, made) - found.y).max() > 1e-3 * np.abs(found.y).max()
