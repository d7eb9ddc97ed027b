"""The JAX function of a check is given the leaves that `infer` found unused, as it was when the rules were derived."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import convert
from convert.core.errors import ConvertError
from convert.references.protocol import Reference
from convert.verify.run import check

RULES = """
model: counted
title: a layer and a counter
axes: {{D: {{is: width}}, E: {{is: width behind}}}}
targets:
  torch: {{loads: torch.nn.Sequential}}
rules:
- einsum: ...D,DE->...E
  from: w
  linear: "0"
- drop: counter
  because: {reason}
- drop: width
  because: a number of the configuration
"""


def _jax(leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    filled = convert.fill_pytree({"w": np.zeros((4, 3)), "counter": np.zeros((), np.int32)}, leaves)
    return {"y": (inputs["x"] @ filled["w"]).reshape(-1, leaves["width"])}


def _build(state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False))
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.eval()


def reference(plan: Any) -> Reference:
    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(5, 4)).astype(np.float32)},
        jax=_jax,
        build=_build,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=4,
        depth=1,
    )


@pytest.mark.parametrize("reason", ["the function computes nothing with it", "the state of the optimizer"])
def test_what_was_found_unused_is_given(reason: str, tmp_path: Path) -> None:
    """A number of the configuration as well, and as it is: with another width the function would refuse its weights."""
    rules, ckpt, out = tmp_path / "rules.yaml", tmp_path / "ckpt.npz", tmp_path / "out.safetensors"
    rules.write_text(RULES.format(reason=reason))
    np.savez(ckpt, w=np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32), counter=np.int32(7), width=3)
    convert.convert(str(rules), ckpt, out)

    def run() -> Any:
        return check(out, ckpt, model=str(rules), reference=f"{__name__}:reference", levels=("model",))

    if reason.startswith("the function"):
        assert run().verdict == "equal", run()
    else:
        with pytest.raises(ConvertError, match="counter: expected a leaf of shape"):
            run()
