"""Every golden goes to safetensors and comes back: the same leaves with the same paths, dtypes and bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

import convert
from convert.checkpoints import open_source
from convert.reversing.source import ReversedSource
from convert.verify.report.report import Verdict
from convert.verify.run import check
from support import (
    flax_families,
    gemma_drawn,
    gemma_image_models,
    gemma_models,
    keras_hub,
    maxtext,
    openpi,
    siglip2,
    t5x_cases,
    tips,
    tunix,
    videoprism,
)
from support.drawn_cases import DrawnCases
from support.goldens import checkpoint, golden_io, relative_error
from support.marks import slow_but
from support.paths import DOCS, GOLDEN, ROOT
from support.timesfm_parity import BOUND

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


def vit(folder: Path) -> Path:
    np.savez(folder / "vit.npz", **DrawnCases(GOLDEN / "vit").leaves("vit"))  # type: ignore[arg-type]
    return folder / "vit.npz"


# Model, case, checkpoint or what writes it into a folder, settings.
GOLDENS: list[tuple[str, str, Path | Callable[[Path], Path], dict[str, Any]]] = [
    *(("timesfm", case, checkpoint(case), {}) for case in ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5")),
    *(("gemma", case, checkpoint(case), gemma_models.settings(case)) for case in gemma_models.CASES),
    *(
        (gemma_image_models.MODEL[case], case, gemma_image_models.path(case), said)
        for case, (_, said) in gemma_image_models.CASES.items()
    ),
    ("recurrentgemma", "recurrentgemma", checkpoint("recurrentgemma"), {}),
    *((model, case, checkpoint(case), {}) for model, cases in FLAX.items() for case in cases),
    *((rules, f"t5x-{case}", partial(t5x_cases.write, case), said) for case, (rules, said) in t5x_cases.RULES.items()),
    *(("tabfm", f"tabfm-{kind}", checkpoint(f"tabfm-{kind}"), {}) for kind in ("classification", "regression")),
    ("vit-jax", "vit", vit, {"image_size": 12}),
    *(
        (maxtext.rules(case), f"maxtext-{case}", maxtext.checkpoint(case), maxtext.settings(case))
        for case in maxtext.CASES
    ),
]
OPENPI = ("pi0", "pi05", "pi0-fast")
MORE = [  # whose own tests do not ask for both, a checkpoint that gives the tree and the rules that do
    *(("keras-hub", f"keras-hub-{case}", partial(keras_hub.checkpoint, case), keras_hub.settings(case)) for case in keras_hub.CASES),
    *(("gemma", case, partial(gemma_drawn.write, case), gemma_drawn.settings(case)) for case in gemma_drawn.CASES),
    *(("openpi", f"openpi-{case}", partial(openpi.write, case), openpi.settings_of(case)) for case in OPENPI),
    ("siglip2", "siglip2", siglip2.write, {}),
    ("tunix-gemma3", "tunix", tunix.write, tunix.SET),
    *((f"tips-{case}", f"tips-{case}", partial(tips.write, case), said) for case, said in tips.SET.items()),
    *(("videoprism", f"videoprism-{case}", partial(videoprism.write, case), videoprism.SET) for case in ("encoder", "lvt")),
]  # fmt: skip
PRODUCTS = {
    "maxtext-deepseek4",
    "maxtext-deepseek4-scanned",
}  # a scale is multiplied into kernels, which the tensors alone do not tell apart
ROUNDED = {"timesfm-1.0": 3, "timesfm-2.0": 12}  # leaves of `1 + scale`, a sum that the first conversion rounds
QUICK = (
    "timesfm-2.5",
    "gemma3-stacked",
    "recurrentgemma",
    "t5-v1.1",
    "tabfm-regression",
    "vit",
    "t5x-umt5-tied",
    "openpi-pi0",
)


@pytest.fixture
def ckpt(at: Path | Callable[[Path], Path], tmp_path: Path) -> Path:
    return at if isinstance(at, Path) else at(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "case", "at", "said"),
    [
        pytest.param(*one, id=one[1], marks=() if one[1] in QUICK else pytest.mark.slow)
        for one in [*GOLDENS, *MORE]
        if one[1] not in PRODUCTS
    ],
)
def test_a_golden_comes_back(model: str, case: str, ckpt: Path, said: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    convert.convert(model, ckpt, out, settings=said)
    plan = convert.plan_reverse(model, out, ckpt, settings=said)
    source, first = ReversedSource(plan), open_source(ckpt)
    source.check_constants()
    assert {kept.leaf for kept in plan.kept} == {drop.leaf for drop in plan.forward.dropped}
    assert not any(made.rest for made in plan.leaves)
    assert source.leaves.keys() == plan.forward.checkpoint.leaves.keys()
    differ = [name for name in first.leaves if source.read(name).tobytes() != first.read(name).tobytes()]
    assert differ == []
    again = tmp_path / "again.safetensors"  # and forth again: the same bytes
    convert.convert(model, source, again, settings=said)
    assert out.read_bytes() == again.read_bytes()


LAYOUTS = {  # of the goldens whose tree is not the usual one
    "gemma2-9b": "NESTED",
    **dict.fromkeys(gemma_drawn.CASES, "NESTED"),
    "gemma3": "NESTED",
    "gemma3-kauldron": "VARIABLES",
    "gemma3-stacked": "STACKED",
    "gemma3-vision": "NESTED",
    "paligemma2": "UNSCANNED",
    "vit": "LINEN",
    "t5x-umt5-unscanned": "UNSCANNED",
    **{f"maxtext-{case}": maxtext.layout(case) for case in maxtext.CASES},
}
FACTORS = {  # without a checkpoint, float32 tensors of these do not tell their leaves: a factor is no power of two
    *("t5x-umt5", "t5x-umt5-unscanned"),
    *(f"maxtext-{case}" for case in maxtext.CASES if case.startswith(("gemma", "llama", "mistral"))),
}
NNX = {
    "maxtext-deepseek3-unscanned"
}  # no layout has the state of MaxText's nnx modules: it comes back with a checkpoint
FOLDED = {
    "dinov2",
    "dinov2-classification",
}  # config.json of the output says that the factor is 1, so it is in the leaves
SAME_TENSORS = {  # as another model of the family
    "gemma-flax": "gemma_flax",
    "keras-hub-llama": "keras-llama",
    "keras-hub-llama3.1-tied": "keras-llama3.1-tied",
}


@pytest.mark.parametrize(
    ("model", "case", "at", "said"),
    [
        pytest.param(*one, id=one[1], marks=() if one[1] in QUICK else pytest.mark.slow)
        for one in [*GOLDENS, *MORE]
        if one[1] not in FACTORS | PRODUCTS | NNX
    ],
)
@pytest.mark.parametrize("header", [True, False], ids=["by convert", "by other code"])
def test_the_rules_give_the_tree_without_a_checkpoint(
    header: bool, model: str, case: str, ckpt: Path, said: dict[str, Any], tmp_path: Path
) -> None:
    """From a file of `convert`, whose header has sizes, and from the files of other code with `config.json`."""
    out = tmp_path / ("out.safetensors" if model in ("recurrentgemma", "timesfm") else "out")
    convert.convert(model, ckpt, out, settings=said)
    options: dict[str, Any] = {"layout": LAYOUTS.get(case)}
    if not header:
        file = out / "model.safetensors" if out.is_dir() else out
        save_torch(load_torch(file), file)
        options["settings"] = {"gating": "FD" if case == "gemma2-9b" else "DF"} if case.startswith("gemma2") else {}
        model = SAME_TENSORS.get(case, model)
        if case == "openpi-pi05":  # openpi's class has no config.json
            options["settings"] = {"N": 8, "A": 2}
    source, first = ReversedSource(convert.plan_reverse(model, out, **options)), open_source(ckpt)
    source.check_constants()
    have = {leaf.keys: name for name, leaf in source.leaves.items()}
    plan = convert.plan_reverse(model, out, ckpt, settings=said) if case not in FOLDED else None
    dropped = {first.leaves[kept.leaf].keys for kept in plan.kept} if plan else set()
    assert have.keys() == {leaf.keys for leaf in first.leaves.values()} - dropped
    differ = []
    for name, leaf in first.leaves.items():
        if leaf.keys not in dropped:
            assert source.leaves[have[leaf.keys]].spec == leaf.spec, name
            differ += [name] if source.read(have[leaf.keys]).tobytes() != first.read(name).tobytes() else []
    assert len(differ) == (ROUNDED.get(case, 0) if case not in FOLDED else 4), differ


def test_what_the_configuration_of_the_jax_model_may_state_differently_is_named(tmp_path: Path) -> None:
    """DINOv2's layerscale_value is 0.3 in the golden, and is in the tensors; config.json next to them says 1."""
    out = tmp_path / "out"
    convert.convert("dinov2", checkpoint("dinov2"), out)
    plan = convert.plan_reverse("dinov2", out)
    (note,) = plan.notes
    assert "layerscale_value 1.0" in note and "lambda1 by it twice" in note
    with pytest.raises(convert.PlanError) as error:  # the header alone says 0.3, and a hidden width of 2 x D
        convert.plan_reverse("dinov2", out / "model.safetensors")
    assert {found.code for found in error.value.findings} == {"not-reversible"}
    convert.convert("timesfm", checkpoint("timesfm-1.0"), tmp_path / "t.safetensors")
    assert [one.pattern for one in convert.plan_reverse("timesfm", tmp_path / "t.safetensors").unwritten][:2] == [
        "/step",
        "/opt_states/**",
    ]


@pytest.mark.slow
def test_a_setting_counts_for_the_models_that_know_it(tmp_path: Path) -> None:
    """Of a family: the flax class of transformers, which has the same tensors, has no N."""
    file = tmp_path / "out.safetensors"
    convert.convert("gemma", checkpoint("gemma1-mqa"), file, settings=gemma_models.settings("gemma1-mqa"))
    save_torch(load_torch(file), file)
    assert convert.plan_reverse("gemma", file, settings={"N": 4}).forward.rules.model == "gemma1"
    silent = convert.plan_reverse("gemma", file)
    assert silent.forward.rules.model == "gemma_flax"
    assert any("may also be of Gemma 1, named by gemma1" in note and "--set N=" in note for note in silent.notes)
    source = openpi.write("pi05", tmp_path)
    convert.convert("openpi", source, file, to="openpi", overwrite=True)
    assert convert.plan_reverse("openpi", file, source, settings={"action_horizon": 3}).forward.rules.model == "pi05"


IMAGES_AND_TEXT = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
PUBLISHED = {  # what stands in the files on the Hub, by what transformers makes of it
    "gemma3-vision": IMAGES_AND_TEXT,
    "paligemma2": IMAGES_AND_TEXT,
    "dinov2": {
        ".attention.q_proj": ".attention.attention.query",
        ".attention.k_proj": ".attention.attention.key",
        ".attention.v_proj": ".attention.attention.value",
        ".attention.o_proj": ".attention.output.dense",
    },
    "bert-model": {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
}


@pytest.mark.parametrize("case", slow_but(["bert-model"], PUBLISHED))
def test_the_names_of_published_files_are_known(case: str, tmp_path: Path) -> None:
    """transformers loads them into the same class, so these are its names; and both give the same tree."""
    import transformers

    model, _, ckpt, said = next(one for one in GOLDENS if one[1] == case)
    out = tmp_path / "out"
    convert.convert(model, ckpt, out, settings=said)  # type: ignore[arg-type]
    own = convert.load_pytree(model, out, layout=LAYOUTS.get(case))
    tensors = load_torch(out / "model.safetensors")
    for new, old in PUBLISHED[case].items():
        assert any(new in name for name in tensors)
        tensors = {name.replace(new, old): x for name, x in tensors.items()}
    save_torch(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (name,) = json.loads((out / "config.json").read_text())["architectures"]
    _, report = getattr(transformers, name).from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    for options in ({"layout": LAYOUTS.get(case)}, {"like": ckpt, "settings": said}):
        plan = convert.plan_reverse(model, out, **options)  # type: ignore[arg-type]
        assert any("as it loads them" in note for note in plan.notes)
    leaves = ReversedSource(convert.plan_reverse(model, out, layout=LAYOUTS.get(case)))
    for leaf_name, leaf in leaves.leaves.items():
        held = own
        for key in leaf.keys:
            held = held[key]
        assert leaves.read(leaf_name).tobytes() == held.tobytes(), leaf_name


@pytest.mark.parametrize(("model", "leaves"), [("bert", 42), ("gpt2", 28)])
def test_the_file_is_the_one_that_transformers_writes(model: str, leaves: int, tmp_path: Path) -> None:
    """`FlaxModel.from_pretrained(...).save_pretrained(...)` of PyTorch weights, run once with transformers 4.49: the same bytes."""
    peer, out = GOLDEN / "from-pytorch" / model, tmp_path / "flax_model.msgpack"
    assert convert.convert_back(model, peer / "in", out, form="msgpack").leaves == leaves
    assert out.read_bytes() == (peer / "out" / "flax_model.msgpack").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(FACTORS))
def test_a_factor_that_rounds_is_refused_with_its_reason(case: str, tmp_path: Path) -> None:
    model, _, at, said = next(one for one in GOLDENS if one[1] == case)
    out = tmp_path / "out"
    convert.convert(model, at if isinstance(at, Path) else at(tmp_path), out, settings=said)
    with pytest.raises(convert.PlanError) as error:
        convert.plan_reverse(model, out, layout=LAYOUTS.get(case))
    assert {found.code for found in error.value.findings} == {"not-reversible"}
    assert all("no power of two" in found.problem and "--like" in found.fix for found in error.value.findings)


@pytest.mark.slow
@pytest.mark.parametrize("like", [True, False], ids=["with a checkpoint", "without"])
@pytest.mark.parametrize("case", sorted(PRODUCTS))
def test_a_product_of_leaves_is_refused_with_its_reason(case: str, like: bool, tmp_path: Path) -> None:
    model, _, at, said = next(one for one in GOLDENS if one[1] == case)
    ckpt, out = at if isinstance(at, Path) else at(tmp_path), tmp_path / "out"
    convert.convert(model, ckpt, out, settings=said)
    with pytest.raises(convert.PlanError) as error:
        if like:
            convert.plan_reverse(model, out, ckpt, settings=said)
        else:
            convert.plan_reverse(model, out, layout=LAYOUTS[case])
    assert {found.code for found in error.value.findings} == {"not-reversible"}
    assert all("a sum or product of several leaves" in found.problem for found in error.value.findings)
    assert all(found.fix.startswith("keep the ") for found in error.value.findings)


BASIC, NAMED = (
    "resnet.basic",
    ("bert.untied", "clip.vision", "vision_text_dual_encoder.clip", "whisper.untied", "bart.untied"),
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=() if one in (BASIC, *NAMED) else pytest.mark.slow) for one in flax_families.GENERIC],
)
def test_the_class_of_config_json_gives_the_tree_of_its_flax_class(case: str, tmp_path: Path) -> None:
    """Also its keys that no name tells: `layer_0` of ResNet's basic layers, Whisper's `lm_head`, the part that CLIP's towers lie in."""
    ckpt, out = flax_families.write(case, tmp_path / "source"), tmp_path / "out"
    convert.convert("flax_transformers", ckpt, out)
    save_torch(load_torch(out / "model.safetensors"), out / "model.safetensors")  # as other code writes it
    source, first = ReversedSource(convert.plan_reverse("flax_transformers", out)), open_source(ckpt)
    source.check_constants()
    dropped = {"masked_spec_embed"} if case == "wav2vec2.adapter" else set()
    assert source.leaves.keys() == first.leaves.keys() - dropped
    assert [name for name, leaf in source.leaves.items() if leaf.spec != first.leaves[name].spec] == []
    assert [name for name in source.leaves if source.read(name).tobytes() != first.read(name).tobytes()] == []


def test_tensors_of_another_class_than_config_json_names_are_one_error(tmp_path: Path) -> None:
    ckpt, out = flax_families.write("bert.BertModel", tmp_path / "source"), tmp_path / "out"
    convert.convert("flax_transformers", ckpt, out)
    stated = json.loads((out / "config.json").read_text())
    for name, code in (("BertForMaskedLM", "leaf-missing"), ("BertForNothing", "class-unknown")):
        (out / "config.json").write_text(json.dumps({**stated, "architectures": [name]}))
        with pytest.raises(convert.PlanError) as error:
            convert.plan_reverse("flax_transformers", out)
        assert {found.code for found in error.value.findings} == {code}


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


@pytest.mark.slow
def test_the_programs_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, but for the class of published size, which a small one replaces."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    guide = (DOCS / "guides" / "back-to-jax.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"small": _small_timesfm_2p5}
    for block in blocks:
        exec(block.replace("TimesFM_2p5_200M_flax_module()", "small()"), names)
    assert len(blocks) == 3 and names["kernel"].shape == (3, 4, 8, 32)
    assert np.array_equal(names["model"].stacked_xf.attn.out.kernel[...], names["kernel"])


def _small_timesfm_2p5() -> Any:
    """Return upstream's flax module in the sizes of the golden."""
    from timesfm.timesfm_2p5 import timesfm_2p5_flax

    from support import upstream

    class Module(timesfm_2p5_flax.TimesFM_2p5_200M_flax_module):
        config = upstream.timesfm_2p5_model().config

    return Module()


MESH = """
import sys, jax, numpy as np, convert
from convert.reversing.source import ReversedSource
from flax import nnx
sys.path.insert(0, sys.argv[2])
from models.test_reverse_models import _small_timesfm_2p5
mesh, read = jax.make_mesh((8,), ("x",)), []
read_box = ReversedSource.read_box
def counted(self, name, box):
    read.append((name, np.prod(box.shape)))
    return read_box(self, name, box)
ReversedSource.read_box = counted
def place(name, spec):
    axis = next((k for k, size in enumerate(spec.shape) if size % 8 == 0), None)
    return jax.sharding.NamedSharding(mesh, jax.P(*(None if k != axis else "x" for k in range(len(spec.shape)))))
tree = convert.load_pytree("timesfm", sys.argv[1], layout="NNX_PURE", sharding=place)
parts = [size for leaf, size in read if leaf == "stacked_xf/attn/out/kernel"]
module = _small_timesfm_2p5()
nnx.update(module, tree)
kernel = module.stacked_xf.attn.out.kernel[...]
assert len(kernel.sharding.device_set) == 8 and kernel.addressable_shards[0].data.shape == (3, 4, 1, 32)
assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(convert.load_pytree("timesfm", sys.argv[1], layout="NNX_PURE"))))
assert parts == [kernel.size // 8] * 8
"""


@pytest.mark.slow
def test_each_of_eight_devices_computes_its_part_for_the_model(tmp_path: Path) -> None:
    convert.convert("timesfm", checkpoint("timesfm-2.5"), tmp_path / "out.safetensors")
    eight = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", MESH, str(tmp_path / "out.safetensors"), str(ROOT / "tests")]
    subprocess.run(command, check=True, env=eight)


@pytest.mark.slow
def test_upstream_s_flax_code_restores_timesfm_2p5_and_gives_the_recorded_outputs(tmp_path: Path) -> None:
    """As upstream loads its own checkpoint: into the state of the nnx module."""
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    out, ckpt, io = tmp_path / "out.safetensors", checkpoint("timesfm-2.5"), golden_io("timesfm-2.5")
    convert.convert("timesfm", ckpt, out)
    convert.convert_back("timesfm", out, tmp_path / "ckpt", like=ckpt)
    graph, state = nnx.split(_small_timesfm_2p5())
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "ckpt", state)
    with jax.default_matmul_precision("highest"):
        decoded = nnx.merge(graph, restored).decode(
            int(io["horizon"]), jax.numpy.asarray(io["inputs"]), jax.numpy.asarray(io["masks"])
        )
    for name, got in zip(("renormed_outputs", "quantile_spread", "ar_outputs"), decoded, strict=True):
        assert relative_error(np.asarray(got), io[name]) < BOUND, name


@pytest.mark.slow
def test_nnx_update_takes_the_tree_of_the_rules(tmp_path: Path) -> None:
    """Without a checkpoint that gives the tree: PyTorch's tensors, the rules, Orbax, `nnx.update`."""
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    out, io = tmp_path / "out.safetensors", golden_io("timesfm-2.5")
    convert.convert("timesfm", checkpoint("timesfm-2.5"), out)
    save_torch(load_torch(out), out)  # as other code writes it
    convert.convert_back("timesfm", out, tmp_path / "ckpt", layout="NNX_PURE")
    module = _small_timesfm_2p5()
    nnx.update(module, ocp.StandardCheckpointer().restore(tmp_path / "ckpt"))
    with jax.default_matmul_precision("highest"):
        decoded = module.decode(int(io["horizon"]), jax.numpy.asarray(io["inputs"]), jax.numpy.asarray(io["masks"]))
    for name, got in zip(("renormed_outputs", "quantile_spread", "ar_outputs"), decoded, strict=True):
        assert relative_error(np.asarray(got), io[name]) < BOUND, name


@pytest.mark.slow
def test_upstream_s_recurrentgemma_gives_the_recorded_logits(tmp_path: Path) -> None:
    """From the tensors of transformers' class, without a checkpoint that gives the tree."""
    import jax
    import orbax.checkpoint as ocp
    from recurrentgemma import common
    from recurrentgemma.jax import griffin

    kinds = common.TemporalBlockType
    config = common.GriffinConfig(  # of tests/golden/make_recurrentgemma.py
        vocab_size=67,
        width=32,
        mlp_expanded_width=44,
        num_heads=4,
        lru_width=32,
        block_types=tuple((kinds.RECURRENT, kinds.RECURRENT, kinds.ATTENTION)[k % 3] for k in range(11)),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=5,
        logits_soft_cap=3.0,
    )
    out, io = tmp_path / "out.safetensors", golden_io("recurrentgemma")
    convert.convert("recurrentgemma", checkpoint("recurrentgemma"), out)
    save_torch(load_torch(out), out)
    convert.convert_back("recurrentgemma", out, tmp_path / "ckpt", settings={"N": 4})
    variables = ocp.StandardCheckpointer().restore(tmp_path / "ckpt")
    with jax.default_matmul_precision("highest"):
        logits, _ = griffin.Griffin(config, gradient_checkpointing=False).apply(
            variables, jax.numpy.asarray(io["tokens"]), jax.numpy.asarray(io["positions"]), return_cache=False
        )
    assert relative_error(np.asarray(logits), io["logits"]) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize(("model", "case"), [("timesfm", "timesfm-2.5"), ("recurrentgemma", "recurrentgemma")])
def test_the_check_says_what_it_says_of_the_first_checkpoint(model: str, case: str, tmp_path: Path) -> None:
    out, ckpt = tmp_path / "out.safetensors", checkpoint(case)
    convert.convert(model, ckpt, out)
    convert.convert_back(model, out, tmp_path / "ckpt", like=ckpt)
    first, second = check(out, ckpt, model=model), check(out, tmp_path / "ckpt", model=model)
    verdicts = {level.level: level.verdict for level in second.levels}
    assert (
        verdicts == {level.level: level.verdict for level in first.levels} and Verdict.FAILED not in verdicts.values()
    )
    assert verdicts["weights"] == verdicts["layers"] == Verdict.PASSED and second.exit_code == first.exit_code


@pytest.mark.slow
@pytest.mark.parametrize("case", flax_families.GENERIC)
def test_a_flax_class_of_transformers_comes_back(case: str, tmp_path: Path) -> None:
    ckpt, out = flax_families.write(case, tmp_path / "source"), tmp_path / "out.safetensors"
    convert.convert("flax_transformers", ckpt, out)
    source, first = ReversedSource(convert.plan_reverse("flax_transformers", out, ckpt)), open_source(ckpt)
    source.check_constants()
    assert source.leaves.keys() == first.leaves.keys()
    assert [name for name in first.leaves if source.read(name).tobytes() != first.read(name).tobytes()] == []
