"""TimesFM 2.5: upstream's flax nnx code, against upstream's PyTorch code or transformers'.

Sources: timesfm 3.0.2 (``timesfm_2p5/*.py``, ``flax/*.py``, ``torch/*.py``), transformers 5.23
(``models/timesfm2_5/modeling_timesfm2_5.py``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.references.loading import config_of, load, on, ready
from convert.references.module_facts import Block, facts
from convert.references.plan_facts import not_installed, require_model
from convert.references.protocol import INPUT, Arrays, Deferred, JaxSide, Reference
from convert.references.timesfm.common import PATCHES, counted, series
from convert.references.timesfm.variants import variants_2p5

if TYPE_CHECKING:
    import torch

INSTALL_TRANSFORMERS = "pip install 'transformers>=5.23'"
INSTALL = "pip install 'timesfm==3.0.2' flax einshape jaxtyping orbax-checkpoint"
QUANTILES = 9
STEPS = 3  # output patches of the forecast: the first comes from the prefill, the others are decoded one after another
OUTPUTS = ("renormed_outputs", "quantile_spread", "ar_outputs")


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint.

    Target ``timesfm`` compares all outputs of ``decode``: the point outputs of every patch, the quantile head, and two steps
    of autoregressive decoding with the cache. Target ``transformers`` compares the values of
    ``TimesFm2_5ModelForPrediction._decode_and_project``: the point outputs of every patch and the quantile head. It has no
    autoregressive part. Its ``forward`` computes another function than ``decode``: it normalises the whole series, averages
    with the negated series and overwrites quantiles.

    Boundaries are those of the first forward pass (the prefill, with a decode cache as ``decode`` makes it).

    Raises:
        ConvertError: the plan is not of TimesFM 2.5, or upstream's code cannot have this size.
    """
    require_model(plan, ("timesfm-2.5",))
    size = plan.sizes
    if size["N"] * size["H"] != size["D"]:
        raise ConvertError(
            Finding(
                "reference-unavailable",
                "upstream's code derives the width of a head from the model width, and cannot run this model",
                path=str(plan.source.path),
                expected=f"{size['D']} // {size['N']} = {size['D'] // size['N']} features in a head",
                got=str(size["H"]),
            )
        )
    layers, patch = size["i"], size["P"]
    upstream = plan.target == "timesfm"
    outputs = OUTPUTS if upstream else OUTPUTS[:2]

    def inputs(seed: int) -> Arrays:
        values, padding = series(seed, patch, slice(0, 2))
        return {"inputs": values, "masks": padding}

    def masks(given: Arrays) -> Arrays:
        keep = counted(given["masks"], patch)
        names = (*_names(layers, plan.target).values(), OUTPUTS[0])
        # in transformers, normalised queries and keys have the heads before the patches
        heads_first = ("q_norm", "k_norm")
        return {name: keep[:, None] if name.removesuffix(INPUT).endswith(heads_first) else keep for name in names}

    return Reference(
        inputs=inputs,
        jax=Deferred(partial(_flax, plan)),
        jax_outputs=Deferred(partial(_flax, plan, boundaries=False)),
        build=partial(_build_upstream if upstream else _build_transformers, plan),
        run=partial(_run_upstream if upstream else _run_transformers, plan),
        outputs=outputs,
        reduction=max(size[letter] for letter in "DFGI"),
        depth=layers,
        masks=masks,
        facts=partial(facts, blocks=_blocks(layers, plan.target)),
        variants=partial(variants_2p5, plan, PATCHES, (STEPS - 1) * size["T"] // patch),
    )


FLAX = "timesfm.timesfm_2p5.timesfm_2p5_flax"


def _upstream(module: str) -> Any:
    """Import a module of the timesfm package.

    The package imports its flax code on every import, and accepts an ImportError. It is blocked unless it is asked for.
    """
    if FLAX in sys.modules:
        return import_module(f"timesfm.{module}")
    sys.modules[FLAX] = None  # type: ignore[assignment]
    try:
        import_module("timesfm")
        if not (module.startswith("flax.") or f"timesfm.{module}" == FLAX):
            return import_module(f"timesfm.{module}")
    finally:
        del sys.modules[FLAX]
    _import_flax()
    return import_module(f"timesfm.{module}")


def _import_flax() -> None:
    """Import upstream's flax code. It builds a model of 200M parameters on import; here it builds one without layers."""
    dense, transformer = (import_module(f"timesfm.flax.{name}") for name in ("dense", "transformer"))
    with (
        mock.patch.object(dense, "ResidualBlock", lambda config: None),
        mock.patch.object(transformer, "Transformer", lambda config, rngs: None),
    ):
        import_module(FLAX)


def _definition(plan: Plan) -> Any:
    """Return upstream's framework-agnostic definition at the plan's sizes."""
    try:
        base = _upstream("timesfm_2p5.timesfm_2p5_base")
    except ImportError as error:
        raise not_installed("timesfm 2.5", error, INSTALL) from error
    return _sized(base.TimesFM_2p5_200M_Definition(), plan.sizes)


def _sized(definition: Any, sizes: Mapping[str, int]) -> Any:
    """Return the definition with these sizes."""
    layers, D, N, F, G, P, T, S = (sizes[letter] for letter in "iDNFGPTS")
    replace, c = dataclasses.replace, definition
    stack, heads = c.stacked_transformers, QUANTILES + 1
    return replace(
        c,
        input_patch_len=P,
        output_patch_len=T,
        output_quantile_len=S,
        tokenizer=replace(c.tokenizer, input_dims=2 * P, hidden_dims=G, output_dims=D),
        stacked_transformers=replace(
            stack,
            num_layers=layers,
            transformer=replace(stack.transformer, model_dims=D, hidden_dims=F, num_heads=N),
        ),
        output_projection_point=replace(c.output_projection_point, input_dims=D, hidden_dims=G, output_dims=T * heads),
        output_projection_quantiles=replace(
            c.output_projection_quantiles, input_dims=D, hidden_dims=G, output_dims=S * heads
        ),
    )


# ---- names of the boundaries, in the order of the data

_BLOCK = ("hidden_layer", f"output_layer{INPUT}", "output_layer", "residual_layer")
_LAYER = {
    # flax: transformers. The PyTorch module of the timesfm package has flax's names, except for the fused projection.
    "pre_attn_ln": "input_layernorm",
    "attn.query": "self_attn.q_proj",
    "attn.key": "self_attn.k_proj",
    "attn.value": "self_attn.v_proj",
    "attn.rotary_position_embedding": "",  # of the query; functions in transformers
    f"attn.query_ln{INPUT}": f"self_attn.q_norm{INPUT}",
    f"attn.key_ln{INPUT}": f"self_attn.k_norm{INPUT}",
    "attn.query_ln": "self_attn.q_norm",
    "attn.key_ln": "self_attn.k_norm",
    "attn.per_dim_scale": "",
    f"attn.out{INPUT}": f"self_attn.o_proj{INPUT}",
    "attn.out": "self_attn.o_proj",
    "post_attn_ln": "post_attention_layernorm",
    "pre_ff_ln": "pre_feedforward_layernorm",
    "ff0": "mlp.fc1",
    f"ff1{INPUT}": f"mlp.fc2{INPUT}",
    "ff1": "mlp.fc2",
    "post_ff_ln": "post_feedforward_layernorm",
}
_FUSED = {"attn.query": "", "attn.key": "", "attn.value": "attn.qkv_proj"}  # at the place of the last of the three


def _names(layers: int, target: str) -> dict[str, str]:
    """Map boundaries in flax to their names in the target's module."""

    def block(flax: str, torch: str) -> Iterator[tuple[str, str]]:
        yield f"{flax}{INPUT}", f"{torch}{INPUT}"
        for name in _BLOCK:
            yield f"{flax}.{name}", f"{torch}.{name.replace('hidden', 'input') if target != 'timesfm' else name}"
        yield flax, torch

    def every() -> Iterator[tuple[str, str]]:
        yield from block("tokenizer", "tokenizer" if target == "timesfm" else "model.input_ff_layer")
        for i in range(layers):
            prefix = f"stacked_xf.{i}" if target == "timesfm" else f"model.layers.{i}"
            for flax, transformers in _LAYER.items():
                torch = _FUSED.get(flax, flax) if target == "timesfm" else transformers
                if torch:
                    yield f"stacked_xf.{i}.{flax}", f"{prefix}.{torch}"
            yield f"stacked_xf.{i}", prefix
        for head in ("output_projection_point", "output_projection_quantiles"):
            yield from block(head, head)

    return dict(every())


def _blocks(layers: int, target: str) -> list[Block]:
    """Return where the target has an activation."""
    names = _names(layers, target)
    holders = ["tokenizer", "output_projection_point", "output_projection_quantiles"]
    blocks = [Block(names[h], names[f"{h}.hidden_layer"], names[f"{h}.output_layer"]) for h in holders]
    for i in range(layers):
        layer = f"stacked_xf.{i}"
        holder = names[layer] if target == "timesfm" else f"{names[layer]}.mlp"
        blocks.append(Block(holder, names[f"{layer}.ff0"], names[f"{layer}.ff1"]))
    return blocks


# ---- JAX's side


def _flax(plan: Plan, boundaries: bool = True) -> JaxSide:
    """Return the function for `Reference.jax`. Upstream is imported outside of it, so that no import is traced.

    Args:
        boundaries: whether it returns them, beside the outputs.
    """
    try:
        from flax import nnx

        dense, upstream = _upstream("flax.dense"), _upstream("timesfm_2p5.timesfm_2p5_flax")
    except ImportError as error:
        raise ImportError(f"{error}; install upstream's package: {INSTALL}", name=error.name) from error
    definition = _definition(plan)
    base: Any = upstream.TimesFM_2p5_200M_flax_module

    class Module(base):  # type: ignore[misc]
        config = definition

        def __init__(self) -> None:
            # The default of ResidualBlock's `rngs` was created outside of any trace and must not change within one.
            with mock.patch.dict(dense.ResidualBlock.__init__.__kwdefaults__, rngs=nnx.Rngs(0)):
                super().__init__()

    class Prefill(Module):
        def __call__(self, *args: Any) -> None:
            super().__call__(*args)
            raise _PrefilledError

    module = nnx.split(nnx.eval_shape(Module))
    return partial(_jax, plan, upstream, module, nnx.split(nnx.eval_shape(Prefill)) if boundaries else None)


def _jax(
    plan: Plan,
    upstream: Any,
    module: tuple[Any, Any],
    prefill: tuple[Any, Any] | None,
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> OrderedDict[str, Any]:
    """Return the boundaries of the prefill (unless it is None), then the outputs of `decode`.

    JAX sorts the keys of dictionaries other than `OrderedDict`.
    """
    names = OUTPUTS if plan.target == "timesfm" else OUTPUTS[:2]
    horizon = (STEPS if plan.target == "timesfm" else 1) * plan.sizes["T"]
    values = {} if prefill is None else _boundaries(upstream, _filled(*prefill, weights), horizon, inputs)
    outputs = _filled(*module, weights).decode(horizon, inputs["inputs"], inputs["masks"])
    return (_as_torch(values, plan) if values else OrderedDict()) | dict(zip(names, outputs, strict=False))


def _filled(graph: Any, state: Any, weights: Mapping[str, Any]) -> Any:
    """Return the nnx module with these weights."""
    from flax import nnx

    leaves = [(path, leaf.replace(weights["/".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


class _PrefilledError(Exception):
    """End `decode` after its first forward pass."""


def _boundaries(upstream: Any, model: Any, horizon: int, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values at all boundaries of the first forward pass of upstream's `decode`, with unrolled layers."""
    import jax
    from flax import nnx

    names: dict[int, str] = {}
    values: dict[str, Any] = {}
    layers: list[Any] = []  # keeps them alive, so that their ids stay unique

    def name(module: Any, prefix: str) -> None:
        for path, node in nnx.iter_modules(module):
            names[id(node)] = ".".join([prefix, *map(str, path)]).strip(".")

    def unrolled(stack: Any, x: Any, mask: Any, cache: Any) -> tuple[Any, Any]:
        graph, state = nnx.split(stack)
        for i in range(jax.tree.leaves(state)[0].shape[0]):
            of_layer = partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)  # compiled once for all layers
            layer = nnx.merge(graph, jax.tree.map(of_layer, state))
            layers.append(layer)
            name(layer, f"stacked_xf.{i}")
            x, _ = layer(x, mask, decode_cache=jax.tree.map(of_layer, cache))
        return x, cache

    name(model, "")
    decode = type(model).decode.__wrapped__  # without jit, so that the values belong to this trace
    with mock.patch.object(upstream, "_apply_stacked_transformers", unrolled), _recording(names, values):
        try:
            decode(model, horizon, inputs["inputs"], inputs["masks"])
        except _PrefilledError:
            return values
    raise AssertionError("decode did not call the module")


@contextmanager
def _recording(names: Mapping[int, str], values: dict[str, Any]) -> Iterator[None]:
    """Within this context, upstream's layers put the input and output of their first call into `values`."""
    from flax import nnx

    transformer = _upstream("flax.transformer")
    classes: tuple[Any, ...] = (
        nnx.Linear,
        nnx.LinearGeneral,
        _upstream("flax.dense").ResidualBlock,
        transformer.RMSNorm,
        transformer.RotaryPositionalEmbedding,
        transformer.PerDimScale,
        transformer.Transformer,
    )
    before = {cls: cls.__call__ for cls in classes}

    def wrap(call: Any) -> Any:
        def recorded(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            out = call(self, x, *args, **kwargs)
            if id(self) in names:
                values.setdefault(names[id(self)] + INPUT, x)
                values.setdefault(names[id(self)], out[0] if isinstance(out, tuple) else out)
            return out

        return recorded

    try:
        for cls, call in before.items():
            cls.__call__ = wrap(call)
        yield
    finally:
        for cls, call in before.items():
            cls.__call__ = call


def _as_torch(values: Mapping[str, Any], plan: Plan) -> OrderedDict[str, Any]:
    """Return the values at flax's boundaries by the target's names and in its layouts."""
    import jax.numpy as jnp

    layers, width = plan.sizes["i"], plan.sizes["D"]
    out: OrderedDict[str, Any] = OrderedDict()
    for flax, torch in _names(layers, plan.target).items():
        value = values[flax]
        if torch.endswith("qkv_proj"):
            parts = [values[flax.replace("value", part)] for part in ("query", "key", "value")]
            value = jnp.concatenate([part.reshape(*part.shape[:2], width) for part in parts], axis=-1)
        elif torch.removesuffix(INPUT).endswith(("q_norm", "k_norm")):
            value = value.swapaxes(1, 2)
        elif torch.endswith((f".out{INPUT}", "_proj", f"o_proj{INPUT}")):
            value = value.reshape(*value.shape[:2], width)
        out[torch] = value
    return out


# ---- PyTorch's side


def _build_upstream(plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    definition = _definition(plan)
    base: Any = _upstream("timesfm_2p5.timesfm_2p5_torch").TimesFM_2p5_200M_torch_module

    class Module(base):  # type: ignore[misc]
        config = definition

    return load(Module(), weights)


def _run_upstream(plan: Plan, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as to:
        values, padding = _tensors(inputs, *to)
        return dict(zip(OUTPUTS, module.decode(STEPS * plan.sizes["T"], values, padding), strict=True))


def _build_transformers(plan: Plan, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    try:
        from transformers import TimesFm2_5Config, TimesFm2_5ModelForPrediction
    except ImportError as error:
        raise not_installed("transformers", error, INSTALL_TRANSFORMERS) from error
    return load(TimesFm2_5ModelForPrediction(TimesFm2_5Config(**config_of(plan))), weights)


def _run_transformers(plan: Plan, module: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    with ready(module) as to:
        _, spread, hidden = module._decode_and_project(*_tensors(inputs, *to))
        normed = module.output_projection_point(hidden.last_hidden_state)
        point = module.model._revin(normed, hidden.context_mu, hidden.context_sigma, reverse=True)
    return {
        "renormed_outputs": point.view(*point.shape[:2], plan.sizes["T"], QUANTILES + 1),
        "quantile_spread": spread,
    }


def _tensors(inputs: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    values, padding = (on(device, inputs[name]) for name in ("inputs", "masks"))
    return values.to(dtype), padding
