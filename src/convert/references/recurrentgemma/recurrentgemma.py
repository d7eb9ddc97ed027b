"""RecurrentGemma (Griffin): upstream's flax code on JAX's side; upstream's PyTorch code, or transformers', on the other.

Sources: recurrentgemma 1.0.1 (``jax/*.py``, ``torch/*.py``), transformers 5.23 (``models/recurrent_gemma``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.loading import config_of, load, on, ready
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import not_installed, require_fact, require_model
from convert.references.protocol import INPUT, Arrays, Reference
from convert.references.recurrentgemma.variants import variants

if TYPE_CHECKING:
    import torch

INSTALL = "pip install 'recurrentgemma[jax]==1.0.1'"
INSTALL_TRANSFORMERS = "pip install 'transformers>=5.23'"
BEYOND = 19  # positions of a sequence in addition to the window, so that no query sees all
LOGITS = "logits"
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, without a cache.

    One sequence starts at position 0 and one in the middle of a document. Target ``recurrentgemma`` also gets a sequence of
    two documents, between which no information may pass. transformers separates documents in the recurrence, but not in the
    convolution before it.

    Raises:
        ConvertError: the plan is of another model, or the window or the soft cap is unknown.
    """
    require_model(plan, ("recurrentgemma",))
    require_fact(plan, "logits_soft_cap")
    size, window = plan.sizes, int(require_fact(plan, "attention_window"))
    steps = window + BEYOND
    upstream = plan.target == "recurrentgemma"

    def inputs(seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        start = np.arange(steps)
        positions = [start, start + 3, *([np.r_[start[: steps // 3], start[: steps - steps // 3]]] if upstream else [])]
        tokens = rng.integers(0, size["V"], (len(positions), steps))
        return {"tokens": tokens.astype(np.int32), "positions": np.stack(positions).astype(np.int32)}

    return Reference(
        inputs=inputs,
        jax=_flax(plan),
        build=partial(_build_upstream if upstream else _build_transformers, plan),
        run=_run_upstream if upstream else _run_transformers,
        outputs=(LOGITS,),
        logits=(LOGITS,),
        reduction=max(size[letter] for letter in "DRF"),
        depth=size["i"],
        facts=partial(_facts, plan),
        variants=partial(variants, plan, steps),
    )


def _upstream(module: str) -> Any:
    try:
        return import_module(f"recurrentgemma.{module}")
    except ImportError as error:
        raise not_installed("recurrentgemma", error, INSTALL) from error


def _config(plan: Plan) -> Any:
    """Return upstream's configuration at the plan's sizes."""
    common, size = _upstream("common"), plan.sizes
    types = {"recurrent": common.TemporalBlockType.RECURRENT, "attention": common.TemporalBlockType.ATTENTION}
    # One of upstream's implementations of the recurrence. The default for CPUs is compiled again for every layer.
    return common.GriffinConfig(
        vocab_size=size["V"],
        width=size["D"],
        mlp_expanded_width=size["F"],
        num_heads=size["N"],
        lru_width=size["R"],
        block_types=tuple(types[word] for word in plan.facts["block_types"]),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=int(plan.facts["attention_window"]),
        logits_soft_cap=float(plan.facts["logits_soft_cap"]),
        scan_type=common.ScanType.ASSOCIATIVE_NATIVE,
    )


# ---- names of the boundaries, in the order of the data: flax's name -> transformers' name

_RECURRENT = {
    "recurrent_block.linear_y": "temporal_block.linear_y",
    "recurrent_block.linear_x": "temporal_block.linear_x",
    "recurrent_block.conv_1d": "",  # transformers cuts the result to length after the module
    f"recurrent_block.rg_lru{INPUT}": f"temporal_block.rg_lru{INPUT}",
    "recurrent_block.rg_lru.input_gate": "",
    "recurrent_block.rg_lru.a_gate": "",
    "recurrent_block.rg_lru": "temporal_block.rg_lru",
    f"recurrent_block.linear_out{INPUT}": f"temporal_block.linear_out{INPUT}",
    "recurrent_block.linear_out": "temporal_block.linear_out",
}
_ATTENTION = {
    "attention_block.proj_q": "temporal_block.q_proj",
    "attention_block.proj_k": "temporal_block.k_proj",
    "attention_block.proj_v": "temporal_block.v_proj",
    f"attention_block.proj_final{INPUT}": f"temporal_block.o_proj{INPUT}",
    "attention_block.proj_final": "temporal_block.o_proj",
}
_MLP = {
    f"channel_pre_norm{INPUT}": f"channel_pre_norm{INPUT}",
    "channel_pre_norm": "channel_pre_norm",
    "mlp_block.ffw_up": "mlp_block.gate_proj",
    "mlp_block.ffw_up[1]": "mlp_block.up_proj",
    f"mlp_block.ffw_down{INPUT}": f"mlp_block.down_proj{INPUT}",
    "mlp_block.ffw_down": "mlp_block.down_proj",
}


def _names(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the boundaries: the name in flax, and the name in the target's module."""
    upstream = plan.target == "recurrentgemma"
    for i, word in enumerate(plan.facts["block_types"]):
        flax, torch = f"blocks.{i}", f"blocks.{i}" if upstream else f"model.layers.{i}"
        norm = {f"temporal_pre_norm{INPUT}": f"temporal_pre_norm{INPUT}", "temporal_pre_norm": "temporal_pre_norm"}
        for name, other in (norm | (_RECURRENT if word == "recurrent" else _ATTENTION) | _MLP).items():
            if (boundary := name if upstream else other) and not boundary.endswith("[1]"):
                yield f"{flax}.{name}", f"{torch}.{boundary}"
        yield flax, torch
    yield "final_norm", "final_norm" if upstream else "model.final_norm"


# ---- JAX's side


def _flax(plan: Plan) -> Callable[..., Any]:
    """Return the function for `Reference.jax`. Upstream is imported outside of it, so that no import is traced."""
    try:
        griffin = import_module("recurrentgemma.jax.griffin")
    except ImportError as error:
        return partial(_absent, error)
    return partial(_jax, plan, griffin.Griffin(_config(plan), gradient_checkpointing=False))


def _absent(error: ImportError, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Any:
    raise ImportError(f"the JAX side of recurrentgemma needs upstream's package ({error}): {INSTALL}", name=error.name)


def _jax(plan: Plan, module: Any, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the boundaries, then the logits. JAX sorts the keys of dictionaries other than `OrderedDict`."""
    from flax import linen as nn

    seen: dict[str, Any] = {}

    def keep(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = call(*args, **kwargs)
        if context.method_name == "__call__" and context.module.path:
            name = ".".join(context.module.path)
            seen.setdefault(name + INPUT, args[0] if args else next(iter(kwargs.values())))
            seen.setdefault(name, out[0] if isinstance(out, tuple) else out)
        return out

    with nn.intercept_methods(keep):
        logits, _ = module.apply(
            {"params": _nested(weights)}, inputs["tokens"], inputs["positions"], return_cache=False
        )
    found: OrderedDict[str, Any] = OrderedDict()
    for flax, torch in _names(plan):
        value = seen[flax.removesuffix("[1]")]
        found[torch] = value[int("[1]" in flax)] if torch.endswith(("gate_proj", "up_proj")) else value
    found[LOGITS] = logits
    return found


def _nested(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of the leaves. Keys are separated by slashes; some contain a dot."""
    tree: dict[str, Any] = {}
    for path, value in weights.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


# ---- PyTorch's side


def _build_upstream(plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    griffin = _upstream("torch.griffin")
    return load(griffin.Griffin(_config(plan), gradient_checkpointing=False), weights)


def _run_upstream(module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as (device, _):
        logits, _ = module(*_tensors(inputs, device), return_cache=False)
    return {LOGITS: logits}


def _build_transformers(plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    try:
        from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM
    except ImportError as error:
        raise not_installed("transformers", error, INSTALL_TRANSFORMERS) from error
    tied = {HEAD: weights[TABLE]} if TABLE in weights else {}
    return load(RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**config_of(plan))), {**tied, **weights})


def _run_transformers(module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as (device, _):
        tokens, positions = _tensors(inputs, device)
        return {LOGITS: module(input_ids=tokens, position_ids=positions, use_cache=False).logits}


def _tensors(inputs: Mapping[str, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, positions = (on(device, inputs[name]).long() for name in ("tokens", "positions"))
    return tokens, positions


def _facts(plan: Plan, module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what the module is configured to compute; the window as JAX counts it, without the position itself."""
    upstream = plan.target == "recurrentgemma"
    blocks = []
    for i, word in enumerate(plan.facts["block_types"]):
        layer = f"blocks.{i}" if upstream else f"model.layers.{i}"
        mlp, recurrent = f"{layer}.mlp_block", f"{layer}.{'recurrent' if upstream else 'temporal'}_block"
        if upstream:
            blocks.append(Block(mlp, f"{mlp}.ffw_up[0]", f"{mlp}.ffw_down", f"{mlp}.ffw_up[1]"))
        else:
            blocks.append(Block(mlp, f"{mlp}.gate_proj", f"{mlp}.down_proj", f"{mlp}.up_proj"))
        if word == "recurrent":
            blocks.append(Block(recurrent, f"{recurrent}.linear_y", f"{recurrent}.linear_out", f"{recurrent}.rg_lru"))
    config = module.config
    global_facts: dict[str, Any] = {"logits_soft_cap": config.logits_soft_cap}
    if upstream:
        global_facts["attention_window"] = config.attention_window_size
        global_facts["block_types"] = [word.name.lower() for word in config.block_types]
    else:
        global_facts["attention_window"] = config.attention_window_size - 1
        global_facts["block_types"] = list(config.block_types)
        global_facts["rotated"] = config.rope_parameters["partial_rotary_factor"]
    return {**common_facts(module, blocks), "": global_facts}
