"""Convert JAX checkpoints to PyTorch safetensors with declarative per-layer rules.

    import convert

    result = convert.convert("timesfm", "ckpt/", "out.safetensors")

    plan = convert.plan_conversion("timesfm", "ckpt/", to="transformers")
    for step in plan.steps:
        print(step.name, step.spec, step.layouts)

Importing this package imports neither JAX nor torch, and neither does converting. Names are loaded on first use, so that
``convert --help`` does not wait for NumPy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.api import convert as convert
    from convert.api import plan_conversion as plan_conversion
    from convert.drafting import draft_rules as draft_rules
    from convert.errors import CheckpointError as CheckpointError
    from convert.errors import ConvertError as ConvertError
    from convert.errors import OutputError as OutputError
    from convert.errors import PlanError as PlanError
    from convert.errors import RuleError as RuleError
    from convert.library import available_rules as available_rules
    from convert.library import load_models as load_models
    from convert.library import load_rules as load_rules
    from convert.plan import Plan as Plan
    from convert.rulefile import RuleFile as RuleFile
    from convert.rules import parse_rules as parse_rules
    from convert.sources import Format as Format
    from convert.sources import Leaf as Leaf
    from convert.sources import Options as Options
    from convert.sources import Source as Source
    from convert.sources import open_source as open_source
    from convert.spec import TensorSpec as TensorSpec
    from convert.steps import Step as Step
    from convert.streaming import Event as Event
    from convert.streaming import Result as Result
    from convert.streaming import execute as execute
    from convert.survey import Survey as Survey
    from convert.survey import survey_rules as survey_rules

_MODULES = {
    "convert.api": ("convert", "plan_conversion"),
    "convert.drafting": ("draft_rules",),
    "convert.errors": ("CheckpointError", "ConvertError", "OutputError", "PlanError", "RuleError"),
    "convert.plan": ("Plan",),
    "convert.library": ("available_rules", "load_models", "load_rules"),
    "convert.rulefile": ("RuleFile",),
    "convert.rules": ("parse_rules",),
    "convert.sources": ("Format", "Leaf", "Options", "Source", "open_source"),
    "convert.spec": ("TensorSpec",),
    "convert.steps": ("Step",),
    "convert.streaming": ("Event", "Result", "execute"),
    "convert.survey": ("Survey", "survey_rules"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'convert' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
