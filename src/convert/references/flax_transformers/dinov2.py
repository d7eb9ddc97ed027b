"""DINOv2: transformers' flax classes in plain JAX (equations.py), against transformers 5.23 (``models/dinov2``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.flax_transformers.equations import dinov2 as equations
from convert.references.flax_transformers.transformers_module import build, run
from convert.references.module_facts import Block
from convert.references.module_facts import facts as common_facts
from convert.references.plan_facts import activation_fact, require_fact, require_model
from convert.references.protocol import Arrays, Reference

OUTPUTS: dict[str, tuple[str, ...]] = {
    "dinov2_classifier": ("logits",),
    "dinov2_model": ("last_hidden_state", "pooler_output"),
}
OUTPUTS |= {f"{model}_unmasked": outputs for model, outputs in OUTPUTS.items()}
OUTPUTS |= {f"{model}_unbiased": outputs for model, outputs in OUTPUTS.items()}
WHOLE = ("num_attention_heads", "mlp_ratio")


def reference(plan: Plan) -> Reference:
    """Return the two models at the size of the plan's checkpoint, for two images.

    Raises:
        ConvertError: the plan is of another model, or lacks a fact.
    """
    require_model(plan, OUTPUTS)
    sizes, outputs = plan.sizes, OUTPUTS[plan.rules.model]
    side = sizes["Z"]
    model = equations.Dinov2(
        sizes["i"],
        int(require_fact(plan, "num_attention_heads")),
        float(require_fact(plan, "layer_norm_eps")),
        activation_fact(plan, "hidden_act"),
        float(require_fact(plan, "layerscale_value")),
        "" if plan.rules.model.startswith("dinov2_model") else "dinov2.",
    )

    def inputs(seed: int) -> Arrays:
        image = np.random.default_rng(seed).normal(size=(2, sizes["R"], side, side))
        return {"pixel_values": image.astype(np.float32)}

    return Reference(
        inputs=inputs,
        jax=partial(equations.run, model),
        build=partial(build, plan, {}),
        run=partial(run, outputs, {}),
        outputs=outputs,
        logits=tuple(output for output in outputs if output == "logits"),
        reduction=max(sizes["F"], sizes["D"], sizes["P"] ** 2 * sizes["R"]),
        depth=sizes["i"],
        facts=_facts,
    )


def _facts(module: Any) -> Mapping[str, Mapping[str, Any]]:
    """Return what the module is configured to compute."""
    config = module.config
    prefix = "dinov2." if "dinov2" in dict(module.named_children()) else ""
    mlps = [f"{prefix}encoder.layer.{i}.mlp" for i in range(config.num_hidden_layers)]
    blocks = [Block(mlp, f"{mlp}.fc1", f"{mlp}.fc2") for mlp in mlps]
    return {**common_facts(module, blocks), "": {name: getattr(config, name) for name in WHOLE}}
