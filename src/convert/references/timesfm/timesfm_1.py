"""TimesFM 1.0 and 2.0: praxis' equations in plain JAX (praxis.py), against upstream's PyTorch code or transformers'.

Sources: timesfm 1.3.0 ``pytorch_patched_decoder.py``, transformers 5.23 ``models/timesfm/modeling_timesfm.py``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from convert.core.errors import ConvertError, UnavailableError
from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.references.loading import config_of, load, on, ready
from convert.references.module_facts import Block, facts
from convert.references.plan_facts import not_installed, require_model
from convert.references.protocol import INPUT, Arrays, Reference
from convert.references.timesfm.common import PATCHES, counted, series
from convert.references.timesfm.variants import variants_1

if TYPE_CHECKING:
    import torch

VARIABLE = "CONVERT_TIMESFM_1"
MODULE = Path("timesfm", "pytorch_patched_decoder.py")
INSTALL = (
    f"pip install --no-deps --target DIR timesfm==1.3.0, and set {VARIABLE}=DIR (a separate folder, because timesfm 3 has the "
    "same package name)"
)
OUTPUTS = ("output_ts", "mean", "full")
STEPS = 2  # output patches of the forecast; the second is decoded from the first
ROUNDING = 1e-6  # of exp(-x) in float32, x up to log(max_timescale)


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint.

    The check compares the outputs of every patch in one pass, and the mean and quantiles of the forecast: two output patches
    for target ``timesfm`` (the second pass sees the first's forecast), one for ``transformers``, whose `forward` stops there.
    Boundaries are those of the first pass.

    Where statistics are computed (the first patch with three valid points), the series are not constant: JAX replaces a
    standard deviation below 1e-7 by 1, timesfm's PyTorch code one below 1e-6, and transformers clamps it to 1e-6.

    Raises:
        ConvertError: the plan is of another model, or it is unknown whether positions are embedded.
    """
    require_model(plan, ("timesfm-1",))
    positions = plan.facts.get("use_positional_embedding")
    if not isinstance(positions, bool):
        raise ConvertError(
            Finding(
                "fact-missing",
                "the tree does not say whether the model embeds positions",
                path=str(plan.source.path),
                fix="give --set use_positional_embedding=true for TimesFM 1.0, =false for 2.0",
            )
        )
    if "i" not in plan.sizes:
        raise ConvertError(
            Finding(
                "reference-unavailable",
                "the number of layers is unknown",
                path=plan.rules.path,
                expected="a rule with the index {i} of the layers",
                got="none",
            )
        )
    layers, patch, horizon = plan.sizes["i"], plan.sizes["P"], plan.sizes["T"]
    upstream = plan.target == "timesfm"
    steps = STEPS if upstream else 1
    patches = PATCHES if upstream else min(PATCHES, int(plan.facts.get("context_length", PATCHES * patch)) // patch)

    def inputs(seed: int) -> Arrays:
        values, padding = series(seed, patch, slice(4, 7), patches)
        ahead = np.zeros((len(padding), steps * horizon), bool)
        freq = np.arange(len(padding)) % plan.sizes["E"]
        return {
            "input_ts": values,
            "input_padding": np.concatenate([padding, ahead], axis=1).astype(np.float32),
            "freq": freq[:, None].astype(np.int32),
        }

    def masks(given: Arrays) -> Arrays:
        keep = counted(given["input_padding"][:, : given["input_ts"].shape[1]], patch)
        everywhere = ("freq_emb", "decoder.freq_emb", "position_emb", "decoder.position_emb")
        names = [name for name in _names(plan) if name not in everywhere]
        return {name: keep[:, None] if name.endswith("self_attn") else keep for name in (*names, "output_ts")}

    return Reference(
        inputs=inputs,
        jax=partial(_jax, plan),
        build=partial(_build_upstream if upstream else _build_transformers, plan),
        run=partial(_run_upstream if upstream else _run_transformers, plan),
        outputs=OUTPUTS,
        reduction=max(plan.sizes[letter] for letter in "DFI"),
        depth=layers,
        masks=masks,
        facts=partial(facts, blocks=_blocks(plan)),
        variants=partial(variants_1, plan, patches),
    )


# ---- names of the boundaries, in the order of the data


def _names(plan: Plan) -> dict[str, str]:
    """Map boundaries in the target's module to those in `Decoder`, which has the names of upstream's PyTorch module."""
    layer = [
        "input_layernorm",
        *(f"self_attn.{part}_proj" for part in ("q", "k", "v")),
        "self_attn",
        f"self_attn.o_proj{INPUT}",
        "self_attn.o_proj",
        f"mlp{INPUT}",
        "mlp.layer_norm",
        "mlp.gate_proj",
        f"mlp.down_proj{INPUT}",
        "mlp.down_proj",
        "mlp",
    ]

    def block(name: str) -> Iterator[str]:
        yield from (f"{name}{part}" for part in (INPUT, ".hidden_layer.0", f".output_layer{INPUT}"))
        yield from (f"{name}{part}" for part in (".output_layer", ".residual_layer", ""))

    def every() -> Iterator[str]:
        yield from block("input_ff_layer")
        if plan.facts["use_positional_embedding"]:
            yield "position_emb"
        yield "freq_emb"
        yield f"stacked_transformer.layers.0.input_layernorm{INPUT}"
        for i in range(plan.sizes["i"]):
            yield from (f"stacked_transformer.layers.{i}.{name}" for name in layer)
        yield from block("horizon_ff_layer")

    def target(name: str) -> str | None:
        if plan.target == "timesfm":  # one fused projection, at the place of the last of the three
            if name.endswith(("q_proj", "k_proj")):
                return None
            return name.replace("v_proj", "qkv_proj")
        if name.endswith("self_attn"):
            return None  # upstream's module gives the probabilities, transformers' the result
        if name.startswith("stacked_transformer."):
            return name.replace("stacked_transformer.", "decoder.")
        name = name.replace("hidden_layer.0", "input_layer")
        return name if name.startswith("horizon") else f"decoder.{name}"

    return {there: name for name in every() if (there := target(name)) is not None}


def _blocks(plan: Plan) -> list[Block]:
    """Return where the target has an activation."""
    upstream = plan.target == "timesfm"
    prefix, hidden = ("", "hidden_layer.0") if upstream else ("decoder.", "input_layer")
    stack = "stacked_transformer" if upstream else "decoder"
    holders = (f"{prefix}input_ff_layer", "horizon_ff_layer")
    mlps = (f"{stack}.layers.{i}.mlp" for i in range(plan.sizes["i"]))
    return [
        *(Block(name, f"{name}.{hidden}", f"{name}.output_layer") for name in holders),
        *(Block(name, f"{name}.gate_proj", f"{name}.down_proj") for name in mlps),
    ]


# ---- JAX's side


def _jax(plan: Plan, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the boundaries of the first pass, then the outputs: the function for `Reference.jax`."""
    import jax.numpy as jnp

    from convert.references.timesfm.praxis import Decoder

    root = f"{plan.root}/" if plan.root else ""
    seen: dict[str, Any] = {}
    decoder = Decoder(
        theta={name.removeprefix(root): value for name, value in weights.items()},
        tap=seen.setdefault,
        layers=plan.sizes["i"],
        patch_len=plan.sizes["P"],
        horizon_len=plan.sizes["T"],
        use_pos_emb=plan.facts["use_positional_embedding"],
    )
    values, padding, freq = (inputs[name] for name in ("input_ts", "input_padding", "freq"))
    output_ts = decoder(values, padding[:, : values.shape[1]], freq)
    outputs = (output_ts, *decoder.decode(values, padding, freq))
    boundaries: OrderedDict[str, Any] = OrderedDict()
    for target, name in _names(plan).items():
        if target.endswith("qkv_proj"):
            parts = [seen[name.replace("v_proj", f"{part}_proj")] for part in "qkv"]
            boundaries[target] = jnp.concatenate(parts, axis=-1)
        else:
            boundaries[target] = seen[name]
    return boundaries | dict(zip(OUTPUTS, outputs, strict=True))


# ---- PyTorch's side


@cache
def _load_module(path: Path) -> ModuleType:
    """Import a module from its file, under another name: its package needs JAX and praxis, and clashes with timesfm 3."""
    spec = importlib.util.spec_from_file_location(f"_convert_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UnavailableError(Finding("reference-unavailable", "cannot be imported", path=str(path)))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def upstream_module() -> ModuleType:
    """Import ``timesfm.pytorch_patched_decoder`` of timesfm 1.3.0, from the folder CONVERT_TIMESFM_1 or as installed.

    Raises:
        UnavailableError: it is in neither place.
    """
    folder = os.environ.get(VARIABLE)
    if folder:
        if not Path(folder, MODULE).is_file():
            problem = f"the folder that {VARIABLE} names does not contain {MODULE}"
            raise UnavailableError(Finding("reference-unavailable", problem, path=folder, fix=INSTALL))
        return _load_module(Path(folder, MODULE).resolve())
    spec = importlib.util.find_spec("timesfm")
    for location in (spec.submodule_search_locations if spec else None) or ():
        path = Path(location, MODULE.name)
        if path.is_file():
            return _load_module(path.resolve())
    problem = f"{MODULE} of timesfm 1.3.0, the PyTorch side, is not installed"
    raise UnavailableError(Finding("reference-unavailable", problem, fix=INSTALL))


def _build_upstream(plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    upstream = upstream_module()
    size = plan.sizes
    config = upstream.TimesFMConfig(
        num_layers=size["i"],
        num_heads=size["N"],
        num_kv_heads=size["N"],
        hidden_size=size["D"],
        intermediate_size=size["F"],
        head_dim=size["H"],
        patch_len=size["P"],
        horizon_len=size["T"],
        use_positional_embedding=plan.facts["use_positional_embedding"],
    )
    return load(upstream.PatchedTimeSeriesDecoder(config), weights)


def _run_upstream(plan: Plan, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as to, _masks_of_float32():
        values, padding, freq = _tensors(inputs, *to)
        context = values.shape[1]
        output_ts = module(values, padding[:, :context], freq)
        mean, full = module.decode(values, padding, freq, padding.shape[1] - context, max_len=context)
    return dict(zip(OUTPUTS, (output_ts, mean, full), strict=True))


@contextmanager
def _masks_of_float32() -> Iterator[None]:
    """Within this context, upstream masks logits with float32's largest number in float64, too.

    Upstream's number for float64 becomes infinite when it is cast to float32 for the softmax. Rows of padding are NaN then,
    which spreads to all others.
    """
    import torch

    upstream = upstream_module()
    large = upstream.get_large_negative_number

    def finite(dtype: torch.dtype) -> torch.Tensor:
        number: torch.Tensor = large(torch.float32 if dtype == torch.float64 else dtype)
        return number.to(dtype)

    with mock.patch.object(upstream, "get_large_negative_number", finite):
        yield


def _build_transformers(plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    try:
        from transformers import TimesFmConfig, TimesFmModelForPrediction
    except ImportError as error:
        raise not_installed("transformers", error, "pip install 'transformers>=5.23'") from error
    module = TimesFmModelForPrediction(TimesFmConfig(**config_of(plan)))
    embedding = getattr(module.decoder, "position_emb", None)
    exact = embedding.inv_timescales if embedding is not None else None
    load(module, weights)
    if exact is not None:
        _keep_exact(embedding, exact)
    return module


def _keep_exact(embedding: Any, exact: torch.Tensor) -> None:
    """Keep the table of timescales that the module computed in float64, if the table in the file is the same but for rounding.

    The table is a buffer that is saved in float32. Its rounding would hide differences of the models. A table that differs by
    more is used as it is in the file.
    """
    import torch

    saved = embedding.inv_timescales
    exact = exact.to(saved.device)
    if exact.dtype == torch.float64 and torch.allclose(saved.to(exact.dtype), exact, rtol=ROUNDING, atol=0):
        embedding.inv_timescales = exact


def _run_transformers(plan: Plan, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as to:
        values, padding, freq = _tensors(inputs, *to)
        context = padding[:, : values.shape[1]]
        hidden = module.decoder(past_values=values, past_values_padding=context, freq=freq)
        output_ts = module._postprocess_output(hidden.last_hidden_state, (hidden.loc, hidden.scale))
        series = [row[pad == 0] for row, pad in zip(values, context, strict=True)]
        ahead = module(past_values=series, freq=[int(f) for f in freq[:, 0]])
    return dict(zip(OUTPUTS, (output_ts, ahead.mean_predictions, ahead.full_predictions), strict=True))


def _tensors(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    values, padding, freq = (on(device, inputs[name]) for name in ("input_ts", "input_padding", "freq"))
    return values.to(dtype), padding.to(dtype), freq.long()
