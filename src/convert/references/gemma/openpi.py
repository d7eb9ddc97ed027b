"""openpi's π0 and π0-FAST: its equations, which are those of PaliGemma and of a second, narrower Gemma, against transformers.

Sources: Physical-Intelligence/openpi@15a9616 ``src/openpi/models/{pi0,pi0_fast,gemma,gemma_fast,siglip}.py``.
tests/models/test_openpi.py compares the values with those that openpi's code gave for the golden cases.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.flax_classes import build_class
from convert.references.gemma import images, jax_model
from convert.references.gemma.jax_model import Gemma, Seen
from convert.references.loading import class_of, on, ready
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import require_fact, require_model
from convert.references.protocol import INPUT, Arrays, Reference

if TYPE_CHECKING:
    import torch

CAMERAS, PROMPT, VELOCITY = 3, 7, "velocity"
SHORTEST, LONGEST = 4e-3, 4.0  # pi0.py, embed_suffix: periods of the time
TOWER = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector"
TEXT = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
TIME = "sinusoid_embeds"
PARTS = {  # names in published files -> in transformers' class, which renames them as it loads
    TOWER: "model.vlm.vision_tower",
    PROJECTOR: "model.vlm.multi_modal_projector",
    TEXT: "model.vlm.language_model",
    EXPERT: "model.dit",
    "action_out_proj": "action_out_proj",
    **{
        name: f"embed_action_time.{name}"
        for name in ("state_proj", "action_in_proj", "action_time_mlp_in", "action_time_mlp_out", TIME)
    },
}
_OF_EXPERT = re.compile(r"^((?:layer_\d+/|final_norm).*)_1(?=/)")


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint: π0's velocity for images, a prompt, a state, noise and a time.

    π0-FAST is PaliGemma, for one image, a prefix and what follows.

    Raises:
        ConvertError: the plan is of π0.5 or for openpi's own class, which is no package, or lacks a fact.
    """
    require_model(plan, ("pi0", "pi0-fast"), ("transformers",))
    sizes, layers = plan.sizes, plan.sizes["i"]
    base, epsilon = float(require_fact(plan, "rope_theta")), float(require_fact(plan, "epsilon"))
    scale = sizes["H"] ** -0.5
    model = Gemma([base] * layers, [1.0] * layers, [None] * layers, scale, None, None, sizes["V"], False)
    if plan.rules.model == "pi0-fast":
        run = partial(images.run_jax, model, epsilon, sizes["L"])
        return images.pair(plan, model, sizes["L"], False, lambda weights, inputs: run(_plain(weights), inputs))
    horizon = int(require_fact(plan, "action_horizon"))

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        present = np.arange(PROMPT) < np.array([[PROMPT], [PROMPT - 2]])
        return {
            "pixels": rng.uniform(-1, 1, (2, CAMERAS, sizes["Z"], sizes["Z"], sizes["R"])).astype(np.float32),
            "cameras": np.array([[1, 1, 1], [1, 1, 0]], np.int32),
            "tokens": np.where(present, rng.integers(1, sizes["V"], present.shape), 0).astype(np.int32),
            "present": present.astype(np.int32),
            "state": rng.standard_normal((2, sizes["X"])).astype(np.float32),
            "noise": rng.standard_normal((2, horizon, sizes["X"])).astype(np.float32),
            "time": rng.uniform(0.1, 1, 2).astype(np.float32),
        }

    return Reference(
        inputs=inputs,
        jax=partial(run_jax, model, epsilon, sizes["L"]),
        build=partial(_build, plan),
        run=partial(_run, sizes["L"], int(require_fact(plan, "image_token"))),
        outputs=(VELOCITY,),
        masks=partial(_masks, sizes["L"], layers),
        reduction=max(sizes[letter] for letter in "DFWMEU"),
        depth=2 * layers + sizes["j"],
        facts=_facts,
    )


# ---- JAX


def _plain(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves by the names that Gemma's have; those of the expert end in ``_1``."""
    return {name.removeprefix("PaliGemma/llm/"): leaf for name, leaf in weights.items()}


def _present(inputs: Mapping[str, Any], soft: int, xp: Any) -> Any:
    """Return [batch, time], true at the tokens of images that are there and of the prompt."""
    return xp.concatenate([xp.repeat(inputs["cameras"], soft, axis=1), inputs["present"]], axis=1) > 0


def run_jax(
    model: Gemma, epsilon: float, soft: int, weights: Mapping[str, Any], inputs: Mapping[str, Any]
) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the published names, and the velocity.

    Args:
        epsilon: of the tower's norms.
        soft: number of tokens of an image.
        inputs: ``pixels`` [batch, camera, height, width, colours]; ``cameras`` [batch, camera] and ``present`` [batch, time], 1 for
            what is there; ``tokens`` [batch, time]; ``state``, ``noise`` and ``time``.
    """
    import jax
    import jax.numpy as jnp

    w = images.unstacked(_plain(weights))
    values: OrderedDict[str, Any] = OrderedDict()

    def dense(name: str, x: Any) -> Any:
        values[name] = x @ w[f"{name}/kernel"] + w[f"{name}/bias"]
        return values[name]

    pixels, tokens = inputs["pixels"], inputs["tokens"]
    tower: OrderedDict[str, Any] = OrderedDict()
    x = images.tower(w, tower, pixels.reshape(-1, *pixels.shape[2:]), epsilon)
    _put(values, tower, images.TOWER, TOWER)
    x = values[PROJECTOR] = x @ w["img/head/kernel"] + w["img/head/bias"]
    text: OrderedDict[str, Any] = OrderedDict()
    prompt = jax_model.embed(w, text, jnp.pad(tokens, ((0, 0), (soft * CAMERAS, 0))))
    x = jnp.concatenate([x.reshape(len(tokens), -1, x.shape[-1]), prompt[:, soft * CAMERAS :]], axis=1)
    present = _present(inputs, soft, jnp)
    places = jnp.cumsum(present, axis=1) - 1
    sees = jnp.broadcast_to(present[:, None], (*present.shape, present.shape[1]))
    _, kept = jax_model.blocks(model, w, text, x, Seen(places, sees))
    _put(values, text, "model", TEXT)

    state = dense("state_proj", inputs["state"])
    actions = dense("action_in_proj", inputs["noise"])
    period = SHORTEST * (LONGEST / SHORTEST) ** jnp.linspace(0.0, 1.0, actions.shape[-1] // 2)
    angle = inputs["time"][:, None] * (1.0 / period * 2 * jnp.pi)
    time = values[TIME] = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
    both = jnp.concatenate([actions, jnp.broadcast_to(time[:, None], actions.shape)], axis=-1)
    x = values[f"action_time_mlp_out{INPUT}"] = jax.nn.silu(dense("action_time_mlp_in", both))
    x = jnp.concatenate([state[:, None], dense("action_time_mlp_out", x)], axis=1)
    block = jnp.minimum(jnp.arange(x.shape[1]), 1)  # the state sees no action
    own = jnp.broadcast_to(block[None, None, :] <= block[None, :, None], (len(x), x.shape[1], x.shape[1]))
    before = jnp.broadcast_to(present[:, None], (*x.shape[:2], present.shape[1]))
    places = present.sum(1)[:, None] + jnp.arange(x.shape[1])[None]
    expert: OrderedDict[str, Any] = OrderedDict()
    leaves = {_OF_EXPERT.sub(r"\1", name): leaf for name, leaf in w.items() if _OF_EXPERT.search(name)}
    seen = Seen(places, jnp.concatenate([before, own], axis=-1), kept)
    x, _ = jax_model.blocks(model, leaves, expert, x, seen)
    _put(values, expert, "model", EXPERT)
    values[VELOCITY] = x[:, 1:] @ w["action_out_proj/kernel"] + w["action_out_proj/bias"]
    return values


def _put(values: Any, more: Mapping[str, Any], prefix: str, published: str) -> None:
    values.update({name.replace(prefix, published, 1): value for name, value in more.items()})


def _masks(soft: int, layers: int, inputs: Arrays) -> dict[str, Any]:
    """Return where the values of the prefix count: not at what is not there, which upstream computes, too."""
    there = _present(inputs, soft, np)
    inner = ["", ".input_layernorm", f".input_layernorm{INPUT}", ".post_attention_layernorm"]
    inner += [f".self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", f"o_proj{INPUT}")]
    inner += [f".mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj", f"down_proj{INPUT}")]
    names = [f"{TEXT}.layers.{i}{name}" for i in range(layers) for name in inner]
    return dict.fromkeys((*names, f"{TEXT}.norm"), there)


# ---- PyTorch


def _build(plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Build transformers' class, whose submodules have the names of the file."""
    import torch

    built = build_class(*class_of(plan), plan, weights)
    whole = torch.nn.Module()
    for name, place in PARTS.items():
        parent, names = whole, name.split(".")
        for step in names[:-1]:
            if step not in dict(parent.named_children()):
                parent.add_module(step, torch.nn.Module())
            parent = parent.get_submodule(step)
        parent.add_module(names[-1], built.get_submodule(place))
    object.__setattr__(whole, "built", built)  # not a submodule: it has the same ones by other names
    return whole.eval()


def _run(soft: int, image_token: int, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    with ready(module) as (device, dtype):
        given = {name: on(device, x) for name, x in inputs.items()}
        places = torch.full((len(given["tokens"]), soft * CAMERAS), image_token, device=device)
        made = module.built(
            input_ids=torch.cat([places, given["tokens"].long()], 1),
            attention_mask=torch.cat([given["cameras"].repeat_interleave(soft, 1), given["present"]], 1).long(),
            pixel_values=given["pixels"].to(dtype).movedim(-1, 2).contiguous(),
            pixel_attention_mask=torch.ones_like(given["cameras"], dtype=torch.bool),
            timestep=given["time"].to(dtype),
            **{name: given[name].to(dtype) for name in ("state", "noise")},
        )
        return {VELOCITY: made.logits}


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    gated = [f"{at}.layers.{i}.mlp" for at in (TEXT, EXPERT) for i in range(len(module.get_submodule(at).layers))]
    towers = [f"{TOWER}.encoder.layers.{j}.mlp" for j in range(len(module.get_submodule(TOWER).encoder.layers))]
    blocks = [Block(at, f"{at}.gate_proj", f"{at}.down_proj", f"{at}.up_proj") for at in gated]
    blocks += [Block(at, f"{at}.fc1", f"{at}.fc2") for at in towers]
    return common_facts(module, blocks)
