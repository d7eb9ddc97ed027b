"""Writes the golden cases of openpi: π0, π0.5 and π0-FAST by openpi's own code, on a CPU, with upstream's versions of JAX and flax.

openpi is no package on PyPI. Its model modules run from a copy of its repository; transformers gets the files that openpi puts in its place:

    git clone https://github.com/Physical-Intelligence/openpi && git -C openpi checkout 15a9616a00943ada6c20a0f158e3adb39df2ccac
    python3.11 -m venv env && env/bin/pip install jax==0.5.3 flax==0.10.2 orbax-checkpoint==0.11.13 'numpy<2' transformers==4.53.2 \\
        torch==2.13.0 einops beartype==0.19.0 jaxtyping==0.2.36 augmax ml_collections safetensors PyYAML
    cp -r openpi/src/openpi/models_pytorch/transformers_replace/* env/lib/python3.11/site-packages/transformers/
    PYTHONPATH=openpi/src:openpi/packages/openpi-client/src:src:tests env/bin/python tests/golden/make_openpi.py openpi

Each openpi/CASE.npz: sizes, names and shapes of the parameters, an observation, and the velocity and the actions after four steps that
upstream's `Pi0` computed in float32 with matmul precision `highest`; of `Pi0FAST` the logits. Velocity and logits also in float64 with casts removed. The weights are those of `drawn` in
tests/support/drawn_cases.py. `peer` is the SHA-256 of the tensors that openpi's own converter makes of the same parameters, without LoRA.
openpi-ckpt is what openpi's `save_state` writes for the case `pi0-lora`: trained parameters in float32, frozen ones in bfloat16.

With `openpi --torch CASE OUT_DIR` the script loads a converted directory in openpi's own `PI0Pytorch`, strictly, and prints the errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import shutil
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
HEADS, HEAD, VOCABULARY, RANK = (
    8,
    4,
    61,
    3,
)  # openpi's PyTorch class has 8 heads in its code; they make up the width of PaliGemma, as published
TEXT = {"width": 32, "depth": 2, "mlp_dim": 24, "num_heads": HEADS, "num_kv_heads": 1, "head_dim": HEAD}
EXPERT = {**TEXT, "width": 12, "mlp_dim": 20}
VISION = {"width": 16, "depth": 2, "mlp_dim": 28, "num_heads": 2}
PATCH, SIDE, ACTION, HORIZON, PROMPT = 4, 8, 5, 3, 6
CASES: dict[str, dict[str, Any]] = {
    "pi0": {"pi05": False, "lora": False}, "pi05": {"pi05": True, "lora": False},
    "pi0-lora": {"pi05": False, "lora": True}, "pi05-lora": {"pi05": True, "lora": True}, "pi0-fast": {"lora": False},
}  # fmt: skip


def _stand_ins() -> None:
    """What openpi imports and the models do not use: the loader of configurations, image augmentation, the command line."""
    for name in ("augmax", "tyro", "openpi.training.config", "openpi.training.utils"):
        with contextlib.suppress(ImportError):
            if importlib.util.find_spec(name) is not None and not name.startswith("openpi"):
                continue
        sys.modules[name] = types.ModuleType(name)
    sys.modules["tyro"].cli = None  # type: ignore[attr-defined]


def _make_small(lora: bool) -> None:
    """Replace upstream's published sizes, which stand in its code, by small ones."""
    from ml_collections import ConfigDict
    from openpi.models import gemma, gemma_fast, model, siglip
    from openpi.models.lora import LoRAConfig
    from openpi.models_pytorch import preprocessing_pytorch

    adapters = {name: LoRAConfig(rank=RANK, alpha=2.0 * RANK) for name in ("attn", "ffn")} if lora else {}
    sizes = {"gemma_2b": TEXT, "gemma_300m": EXPERT}
    gemma.get_config = lambda variant: gemma.Config(**sizes[variant.removesuffix("_lora")], lora_configs=adapters)
    gemma.PALIGEMMA_VOCAB_SIZE = VOCABULARY
    fast = {"norm_eps": 1e-6, "vocab_size": VOCABULARY, "scan": True, "remat_policy": "nothing_saveable"}
    gemma_fast.get_config = lambda variant: ConfigDict({**TEXT, **fast, "variant": variant})
    siglip.decode_variant = lambda variant: {**VISION, "patch_size": (PATCH, PATCH)}
    model.IMAGE_RESOLUTION = (SIDE, SIDE)
    for module in (model.preprocess_observation, preprocessing_pytorch.preprocess_observation_pytorch):
        module.__kwdefaults__["image_resolution"] = (SIDE, SIDE)


def _observation(case: str) -> dict[str, Any]:
    from openpi.models.model import IMAGE_KEYS

    rng = np.random.default_rng(len(case))
    cameras = ("base_0_rgb", "base_1_rgb", "wrist_0_rgb") if case == "pi0-fast" else IMAGE_KEYS
    lengths = np.array([PROMPT, PROMPT - 2])
    present = np.arange(PROMPT) < lengths[:, None]
    given: dict[str, Any] = {
        f"images/{name}": rng.uniform(-1, 1, (2, SIDE, SIDE, 3)).astype(np.float32) for name in cameras
    }
    given |= {f"image_masks/{name}": np.array([True, name != cameras[-1]]) for name in cameras}
    given["state"] = rng.standard_normal((2, ACTION)).astype(np.float32)
    given["tokenized_prompt"] = np.where(present, rng.integers(3, VOCABULARY, (2, PROMPT)), 0).astype(np.int32)
    given["tokenized_prompt_mask"] = present
    if case == "pi0-fast":
        given["token_ar_mask"] = np.broadcast_to(np.arange(PROMPT) >= 3, (2, PROMPT)).astype(np.int32)
    else:
        given["noise"] = rng.standard_normal((2, HORIZON, ACTION)).astype(np.float32)
        given["time"] = np.array([0.7, 0.35], np.float32)
    return given


def _observed(given: Mapping[str, Any]) -> Any:
    import jax.numpy as jnp
    from openpi.models.model import Observation

    nested: dict[str, Any] = {"images": {}, "image_masks": {}}
    for name, x in given.items():
        above, _, below = name.partition("/")
        if below:
            nested[above][below] = jnp.asarray(x)
        elif name not in ("noise", "time"):
            nested[name] = jnp.asarray(x)
    return Observation(**nested)


def _velocity(model: Any, observation: Any, noise: Any, time: Any) -> Any:
    """The part of upstream's `compute_loss` that predicts: prefix and suffix in one pass."""
    import jax.numpy as jnp
    from openpi.models.pi0 import make_attn_mask

    prefix, prefix_mask, prefix_blocks = model.embed_prefix(observation)
    suffix, suffix_mask, suffix_blocks, condition = model.embed_suffix(observation, noise, time)
    mask = jnp.concatenate([prefix_mask, suffix_mask], axis=1)
    attends = make_attn_mask(mask, jnp.concatenate([prefix_blocks, suffix_blocks]))
    positions = jnp.cumsum(mask, axis=1) - 1
    (_, out), _ = model.PaliGemma.llm(
        [prefix, suffix], mask=attends, positions=positions, adarms_cond=[None, condition]
    )
    return model.action_out_proj(out[:, -model.action_horizon :])


def _computed(model: Any, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What upstream computes in float32, and what its function computes in float64 with casts removed."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from openpi.models.pi0_fast import make_attn_mask

    from convert.numerics.lift_jax import float64, lift

    graph, state = nnx.split(model)

    def one_pass(state: Any, given: Mapping[str, Any]) -> Any:
        made, observation = nnx.merge(graph, state), _observed(given)
        if "noise" in given:
            return _velocity(made, observation, given["noise"], given["time"])
        embedded, mask, blocks = made.embed_inputs(observation)
        positions = jnp.cumsum(mask, axis=1) - 1
        return made.PaliGemma.llm(embedded_prefix=embedded, mask=make_attn_mask(mask, blocks), positions=positions)[0]

    def sampled(state: Any, given: Mapping[str, Any]) -> Any:
        return nnx.merge(graph, state).sample_actions(
            jax.random.key(0), _observed(given), num_steps=4, noise=given["noise"]
        )

    name = "velocity" if "noise" in given else "logits"
    rounded = {name: jax.jit(one_pass)(state, given)} | (
        {"actions": jax.jit(sampled)(state, given)} if "noise" in given else {}
    )
    with float64():
        exact = {name: lift(one_pass)(state, given)}
    return rounded, exact


def record(case: str) -> None:
    """Replace a case."""
    import jax
    from flax import nnx, traverse_util
    from openpi.models import pi0_config, pi0_fast

    from support.drawn_cases import DrawnCases, drawn

    settings = CASES[case]
    _make_small(settings["lora"])
    if case == "pi0-fast":
        config: Any = pi0_fast.Pi0FASTConfig(
            dtype="float32", action_dim=ACTION, action_horizon=HORIZON, max_token_len=PROMPT
        )
    else:
        config = pi0_config.Pi0Config(
            dtype="float32", action_dim=ACTION, action_horizon=HORIZON, max_token_len=PROMPT, pi05=settings["pi05"],
            **({"paligemma_variant": "gemma_2b_lora", "action_expert_variant": "gemma_300m_lora"} if settings["lora"] else {}),
        )  # fmt: skip
    model = config.create(jax.random.key(0))
    state = nnx.state(model)
    flat = traverse_util.flatten_dict(state.to_pure_dict(), sep="/")
    leaves = {name: drawn(f"{case}/{name}", x.shape) for name, x in flat.items()}
    state.replace_by_pure_dict(traverse_util.unflatten_dict({tuple(n.split("/")): x for n, x in leaves.items()}))
    nnx.update(model, state)
    given = _observation(case)
    out, exact = ({name: np.asarray(x) for name, x in found.items()} for found in _computed(model, given))
    sizes = {"text": TEXT, "expert": EXPERT, "vision": {**VISION, "patch": PATCH, "side": SIDE}, **settings}
    if case != "pi0-fast":
        sizes["peer"] = _peer(case, leaves)
    DrawnCases(HERE / "openpi").save(case, sizes, leaves, given, out, exact)
    name = next(iter(exact))
    print(
        f"{case}: {len(leaves)} leaves, drift of {name} {np.abs(exact[name] - out[name]).max() / np.abs(exact[name]).max():.1e}"
    )
    if case == "pi0-lora":
        _save_state(state, config.get_freeze_filter())


def _peer(case: str, leaves: Mapping[str, Any]) -> str:
    """The SHA-256 of the tensors of openpi's own converter: names in their order, and little-endian float32."""
    weights = _converted_by_openpi(case, leaves)
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + np.ascontiguousarray(weights[name]).astype("<f4").tobytes())
    return digest.hexdigest()


def _converted_by_openpi(case: str, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Run the functions of examples/convert_jax_model_to_pytorch.py with small sizes; the table has the name that its file has."""
    import torch

    file = Path(sys.argv[1]) / "examples" / "convert_jax_model_to_pytorch.py"
    spec = importlib.util.spec_from_file_location("openpi_converter", file)
    assert spec is not None and spec.loader is not None
    converter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    names = {
        "width": "hidden_size", "depth": "num_hidden_layers", "mlp_dim": "intermediate_size", "num_heads": "num_attention_heads", "head_dim": "head_dim",
    }  # fmt: skip

    def config(sizes: Mapping[str, int]) -> Any:
        return types.SimpleNamespace(**{names[k]: n for k, n in sizes.items() if k in names})

    below = {
        name.removeprefix("PaliGemma/"): np.array(x) for name, x in leaves.items() if name.startswith("PaliGemma/")
    }
    both = types.SimpleNamespace(text_config=config(TEXT), vision_config=config(VISION))
    pi05 = CASES[case]["pi05"]
    first, expert = converter.slice_paligemma_state_dict(below, both)
    second = converter.slice_gemma_state_dict(
        expert, config(EXPERT), num_expert=1, checkpoint_dir="pi05" if pi05 else "pi0", pi05=pi05
    )
    made = {
        n: x for n, x in {**first, **second}.items() if n.startswith("paligemma_with_expert.")
    }  # the rest is what strict=False drops
    table = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    made["paligemma_with_expert.paligemma.lm_head.weight"] = made.pop(table)
    for name, x in leaves.items():
        if "/" in name and not name.startswith("PaliGemma/"):
            module, _, role = name.partition("/")
            made[f"{module}.{'weight' if role == 'kernel' else role}"] = torch.from_numpy(np.array(x).T)
    return {name: x.numpy() for name, x in made.items()}


def _save_state(state: Any, frozen: Any) -> None:
    """Save as openpi's `save_state` does: `params` of a step, frozen leaves in bfloat16 as its `init_train_state` makes them."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    from openpi.shared import nnx_utils

    mixed = nnx_utils.state_map(state, frozen, lambda p: p.replace(p.value.astype(jnp.bfloat16)))
    folder = HERE / "openpi-ckpt"
    shutil.rmtree(folder, ignore_errors=True)
    handlers = {name: ocp.PyTreeCheckpointHandler() for name in ("train_state", "params")}
    with ocp.CheckpointManager(folder, item_handlers=handlers) as manager:
        manager.save(7, {"train_state": {"step": jnp.asarray(7)}, "params": {"params": mixed}})
    for file in folder.rglob("commit_success.txt"):
        file.write_text("Checkpoint commit was successful.")
    kinds = [str(x.dtype) for x in jax.tree.leaves(mixed)]
    print(f"openpi-ckpt: {kinds.count('bfloat16')} leaves of bfloat16, {kinds.count('float32')} of float32")


def run_pytorch(case: str, folder: Path) -> None:
    """Print the error of openpi's own PyTorch class, which reads a converted directory as `load_pytorch` does."""
    import torch
    from openpi.models import pi0_config
    from safetensors.torch import load_model
    from transformers import GemmaConfig, PaliGemmaConfig

    from support.drawn_cases import DrawnCases

    file = Path(sys.argv[1]) / "src" / "openpi" / "models_pytorch" / "gemma_pytorch.py"
    text = file.read_text()
    for published, small in (("257152", VOCABULARY), ("4304", VISION["mlp_dim"]), ("2048", TEXT["width"])):
        assert published in text
        text = text.replace(published, str(small))
    module = sys.modules["openpi.models_pytorch.gemma_pytorch"]
    exec(compile(text, str(file), "exec"), module.__dict__)
    tower = {"hidden_size": VISION["width"], "num_hidden_layers": VISION["depth"], "num_attention_heads": VISION["num_heads"], "patch_size": PATCH, "image_size": SIDE, "vision_use_head": False}  # fmt: skip
    small = lambda: PaliGemmaConfig(vision_config={**tower, "model_type": "siglip_vision_model"}, text_config={"model_type": "gemma", "hidden_size": TEXT["width"]}, projection_dim=TEXT["width"])  # noqa: E731  # fmt: skip
    module.CONFIG_MAPPING = {"paligemma": small, "gemma": GemmaConfig}  # type: ignore[attr-defined]
    sys.modules["openpi.models_pytorch.pi0_pytorch"].PaliGemmaWithExpertModel = module.PaliGemmaWithExpertModel  # type: ignore[attr-defined]
    config = pi0_config.Pi0Config(dtype="float32", action_dim=ACTION, action_horizon=HORIZON, max_token_len=PROMPT, pi05=CASES[case]["pi05"], pytorch_compile_mode=None)  # fmt: skip
    model = sys.modules["openpi.models_pytorch.pi0_pytorch"].PI0Pytorch(config).eval()
    load_model(model, folder / "model.safetensors", strict=True)
    cases = DrawnCases(HERE / "openpi")
    given = {name: torch.from_numpy(x) for name, x in cases.values(case, "in").items()}
    nested = {
        kind: {n.partition("/")[2]: x for n, x in given.items() if n.startswith(f"{kind}/")}
        for kind in ("images", "image_masks")
    }
    nested["images"] = {name: x.permute(0, 3, 1, 2) for name, x in nested["images"].items()}
    plain = {n: x for n, x in given.items() if "/" not in n and n not in ("noise", "time")}
    observation = types.SimpleNamespace(**nested, **plain, token_ar_mask=None, token_loss_mask=None)
    with torch.no_grad():
        got = model.sample_actions("cpu", observation, noise=given["noise"], num_steps=4).numpy()
    want = cases.values(case, "out")["actions"]
    print(f"{case}: PI0Pytorch's actions {np.abs(got - want).max() / np.abs(want).max():.1e}")


if __name__ == "__main__":
    _stand_ins()
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    if sys.argv[2:3] == ["--torch"]:
        _make_small(lora=False)
        run_pytorch(sys.argv[3], Path(sys.argv[4]))
    else:
        for each in sys.argv[2:] or CASES:
            record(each)
