"""Every golden goes to safetensors and comes back: the same leaves with the same paths, dtypes and bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.checkpoints import open_source
from convert.reversing.source import ReversedSource
from convert.writing.written import open_written
from support import gemma_image_models, gemma_models
from support.goldens import checkpoint
from support.paths import DOCS, ROOT

FLAX = {
    "bert": ("bert-model", "bert-pretraining", "bert-classification", "bert-tokens", "bert-answers", "bert"),
    "gpt2": ("gpt2", "gpt2-model"),
    "t5": ("t5", "t5-v1.1"),
    "whisper": ("whisper",),
    "llama": ("llama", "llama-model"),
    "mistral": ("mistral", "mistral-model"),
    "gemma": ("gemma-flax", "gemma-flax-untied", "gemma-flax-model"),
    "dinov2": ("dinov2", "dinov2-classification"),
}
GOLDENS: list[tuple[str, str, Path, dict[str, Any]]] = [
    *(("timesfm", case, checkpoint(case), {}) for case in ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5")),
    *(("gemma", case, checkpoint(case), gemma_models.settings(case)) for case in gemma_models.CASES),
    *(
        (gemma_image_models.MODEL[case], case, gemma_image_models.path(case), said)
        for case, (_, said) in gemma_image_models.CASES.items()
    ),
    ("recurrentgemma", "recurrentgemma", checkpoint("recurrentgemma"), {}),
    *((model, case, checkpoint(case), {}) for model, cases in FLAX.items() for case in cases),
]
ROUNDED = {"timesfm-1.0": 3, "timesfm-2.0": 12}  # leaves of `1 + scale`, a sum that the first conversion rounds
REFUSED = {"dinov2": 4, "dinov2-classification": 0}  # tensors with a factor that is no power of two


@pytest.mark.parametrize(("model", "case", "ckpt", "said"), GOLDENS, ids=[case for _, case, _, _ in GOLDENS])
def test_a_golden_comes_back(model: str, case: str, ckpt: Path, said: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert.convert(model, ckpt, out, settings=said)
    if REFUSED.get(case):
        with pytest.raises(convert.PlanError) as error:
            convert.plan_reverse(model, out, ckpt, settings=said)
        assert [finding.code for finding in error.value.findings] == ["not-reversible"] * REFUSED[case]
        return
    plan = convert.plan_reverse(model, out, ckpt, settings=said)
    source, first = ReversedSource(plan), open_source(ckpt)
    source.check_constants()
    assert {kept.leaf for kept in plan.kept} == {drop.leaf for drop in plan.forward.dropped}
    assert not any(made.rest for made in plan.leaves)
    assert source.leaves.keys() == plan.forward.checkpoint.leaves.keys()
    differ = [name for name in first.leaves if source.read(name).tobytes() != first.read(name).tobytes()]
    assert len(differ) == ROUNDED.get(case, 0), differ
    again = (
        tmp_path / "again.safetensors"
    )  # and forth again: the same bytes, with the same digest of the leaves where they are the same
    convert.convert(model, source, again, settings=said)
    one, two = open_written(out), open_written(again)
    assert all(np.array_equal(one.read(name).view(np.uint8), two.read(name).view(np.uint8)) for name in one.tensors)
    assert (out.read_bytes() == again.read_bytes()) == (not differ)


def test_each_device_of_a_mesh_gets_its_part(tmp_path: Path) -> None:
    import jax

    out, ckpt = tmp_path / "out.safetensors", checkpoint("timesfm-2.5")
    convert.convert("timesfm", ckpt, out)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    seen: list[str] = []

    def sharding(name: str, spec: convert.TensorSpec) -> jax.sharding.Sharding:
        seen.append(name)
        axes = ("x",) if spec.shape else ()
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    tree = convert.load_pytree("timesfm", out, like=ckpt, sharding=sharding)
    first = open_source(ckpt)
    assert seen == list(first.leaves)
    leaf = tree["stacked_xf"]["attn"]["out"]["kernel"]["value"]
    assert isinstance(leaf, jax.Array) and leaf.sharding.mesh == mesh
    assert np.array_equal(np.asarray(leaf), first.read("stacked_xf/attn/out/kernel/value"))


def test_the_programs_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "guides" / "back-to-jax.md").read_text(), re.DOTALL | re.MULTILINE
    )
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 2 and names["kernel"].shape == (3, 4, 8, 32)
