"""The upstream PyTorch models at the sizes of the golden checkpoints, and what the JAX models gave for them."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch

from support import wheels
from support.goldens import TIMESFM_1_CASES

# The last release with TimesFM 1.x. It shares its package name with timesfm 3, so it lives in a folder of its own, and
# only the module with the PyTorch decoder, which needs nothing but torch, is imported.
TIMESFM_1 = "timesfm==1.3.0"

WIDTH = 32


@cache
def timesfm_1() -> ModuleType:
    """Upstream's ``timesfm.pytorch_patched_decoder`` of timesfm 1.3.0, installed on first use."""
    module = wheels.installed(TIMESFM_1) / "timesfm" / "pytorch_patched_decoder.py"
    spec = importlib.util.spec_from_file_location("timesfm_1_pytorch_patched_decoder", module)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def timesfm_1_model(case: str) -> torch.nn.Module:
    """Upstream's ``PatchedTimeSeriesDecoder`` at the golden's size."""
    upstream = timesfm_1()
    facts = TIMESFM_1_CASES[case]
    config = upstream.TimesFMConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        head_dim=WIDTH // facts["num_heads"],
        num_kv_heads=facts["num_heads"],
        **facts,
    )
    return upstream.PatchedTimeSeriesDecoder(config).eval()


def timesfm_1_decode(model: torch.nn.Module, io: Any) -> dict[str, np.ndarray]:
    """`decode` on the golden's inputs."""
    with torch.no_grad():
        mean, full = model.decode(
            torch.tensor(io["input_ts"], dtype=torch.float32),
            torch.tensor(io["input_padding"], dtype=torch.float32),
            torch.tensor(io["freq"], dtype=torch.long),
            horizon_len=128,
            output_patch_len=128,
            max_len=512,
        )
    return {"mean": mean.numpy(), "full": full.numpy()}


def timesfm_2p5_definition(layers: int, heads: int, width: int, quantile_len: int) -> Any:
    """Upstream's definition of TimesFM 2.5 at another size."""
    from timesfm.timesfm_2p5 import timesfm_2p5_base as base

    replace = dataclasses.replace
    c = base.TimesFM_2p5_200M_Definition()
    transformer = replace(c.stacked_transformers.transformer, model_dims=width, hidden_dims=width, num_heads=heads)
    return replace(
        c,
        output_quantile_len=quantile_len,
        tokenizer=replace(c.tokenizer, hidden_dims=width, output_dims=width),
        stacked_transformers=replace(c.stacked_transformers, num_layers=layers, transformer=transformer),
        output_projection_point=replace(c.output_projection_point, input_dims=width, hidden_dims=width),
        output_projection_quantiles=replace(
            c.output_projection_quantiles, input_dims=width, hidden_dims=width, output_dims=quantile_len * 10
        ),
    )


def timesfm_2p5_model(layers: int = 3, heads: int = 4, width: int = WIDTH, quantile_len: int = 64) -> torch.nn.Module:
    """Upstream's torch module of TimesFM 2.5; the defaults are the golden's size."""
    from timesfm.timesfm_2p5 import timesfm_2p5_torch as upstream

    definition = timesfm_2p5_definition(layers, heads, width, quantile_len)

    class Module(upstream.TimesFM_2p5_200M_torch_module):
        config = definition

    return Module().eval()


def timesfm_2p5_decode(model: torch.nn.Module, io: Any) -> dict[str, np.ndarray]:
    """`decode` on the golden's inputs."""
    names = ("renormed_outputs", "quantile_spread", "ar_outputs")
    outputs = model.decode(int(io["horizon"]), torch.tensor(io["inputs"]), torch.tensor(io["masks"]))
    return {name: output.numpy() for name, output in zip(names, outputs, strict=True)}
