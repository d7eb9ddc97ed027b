"""The references of the catalogue's models without their boundaries: the JAX side returns the outputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert import Plan
from convert.core.user_code import REFERENCE_OPTION, find_factory
from convert.references.protocol import Reference
from faults.own_models import OWN


def reference(plan: Plan) -> Reference:
    """The reference of the rules, or of the catalogue's own model with these rules."""
    case = Path(plan.rules.path).stem
    made: Reference = find_factory(
        OWN[case].reference if case in OWN else plan.rules.reference or "", REFERENCE_OPTION
    )(plan)
    side = made.jax_side()

    def outputs_alone(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        values = side(weights, inputs)
        return {name: values[name] for name in made.outputs}

    return replace(made, jax=outputs_alone, variants=lambda name: ())
