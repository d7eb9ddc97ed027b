"""Planning takes each flax family in its published size, and shows the time that it takes: no formula of a size is wrong there, nor a default that config.json leaves out."""

from __future__ import annotations

import json
import lzma
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import convert
from support.flax_families import CASES, OWN_RULES
from support.goldens import SpecsOnly
from support.paths import GOLDEN

pytestmark = pytest.mark.slow

PUBLISHED: dict[str, dict[str, Any]] = json.loads(lzma.decompress((GOLDEN / "flax-published.json.xz").read_bytes()))


def planned(family: str, config: dict[str, Any], folder: Path) -> convert.Plan:
    source = SpecsOnly({name: (tuple(shape), "float32") for name, shape in PUBLISHED[family]["leaves"].items()})
    source.path = folder
    (folder / "config.json").write_text(json.dumps(config))
    return convert.plan_conversion(family if family in OWN_RULES else "flax-transformers", source)


def test_all_families_are_there() -> None:
    families = {case.partition(".")[0] for case in CASES}
    assert len(families) == 39 and families <= PUBLISHED.keys()


@pytest.mark.parametrize("keys", ["stated", "whole"])
@pytest.mark.parametrize("family", PUBLISHED)
def test_the_published_size_is_planned(family: str, keys: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    planned(family, PUBLISHED[family][keys], tmp_path)
    start = time.process_time()
    plan = planned(family, PUBLISHED[family][keys], tmp_path)
    took = time.process_time() - start
    with capsys.disabled():
        sys.stdout.write(f" {family}, {len(plan.source.leaves)} leaves: planned in {took:.2f} s")
    assert {part.leaf for step in plan.steps for part in step.parts} | {drop.leaf for drop in plan.dropped} == set(plan.source.leaves)  # fmt: skip
