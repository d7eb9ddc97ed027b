"""Convert JAX checkpoints to PyTorch safetensors with declarative per-layer rules.

    import convert

    result = convert.convert("timesfm", "ckpt/", "out.safetensors")

    plan = convert.plan_conversion("timesfm", "ckpt/", to="transformers")
    for step in plan.steps:
        print(step.name, step.spec, step.layouts)

Importing this package imports neither JAX nor torch, and neither does converting. Names are loaded on first use, so that
``convert --help`` does not wait for NumPy.
"""

from __future__ import annotations

import sys


def _is_program() -> bool:
    """Whether this process is the command line: ``python -m convert``, or the script that pip has made."""
    if sys.argv[:1] == ["-m"]:  # Python looks for the module; afterwards argv has its path
        after = sys.orig_argv.index("-m") + 1
        return sys.orig_argv[after : after + 1] == ["convert"]
    folder, _, name = sys.argv[0].replace("\\", "/").rpartition("/") if sys.argv else ("", "", "")
    return name in ("convert", "ckpt-convert") and folder.endswith(("bin", "Scripts"))


def _end_by_interrupt() -> None:
    """Let Ctrl-C end the process instead of raising `KeyboardInterrupt`, until `convert.core.system.signals` handles it."""
    import _signal  # type: ignore[import-not-found]  # built in; while `signal` is imported, Ctrl-C would raise

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


if _is_program():
    _end_by_interrupt()

from importlib import import_module  # noqa: E402 - after the handler

TYPE_CHECKING = False  # the command line handles signals first; the module `typing` takes longer to import
if TYPE_CHECKING:
    from typing import Any

    from convert.api import convert as convert
    from convert.api import convert_adapter as convert_adapter
    from convert.api import convert_back as convert_back
    from convert.api import load_into as load_into
    from convert.api import load_pytree as load_pytree
    from convert.api import plan_conversion as plan_conversion
    from convert.api import plan_reverse as plan_reverse
    from convert.api import state_dict as state_dict
    from convert.checkpoints import Format as Format
    from convert.checkpoints import Leaf as Leaf
    from convert.checkpoints import Options as Options
    from convert.checkpoints import Source as Source
    from convert.checkpoints import open_source as open_source
    from convert.core.errors import CheckpointError as CheckpointError
    from convert.core.errors import ConvertError as ConvertError
    from convert.core.errors import OutputError as OutputError
    from convert.core.errors import PlanError as PlanError
    from convert.core.errors import RuleError as RuleError
    from convert.core.tensor_spec import TensorSpec as TensorSpec
    from convert.drafting import draft_rules as draft_rules
    from convert.drafting.survey import Survey as Survey
    from convert.drafting.survey import survey_rules as survey_rules
    from convert.inference.derivation import Derivation as Derivation
    from convert.inference.infer import infer as infer
    from convert.layers.base import Step as Step
    from convert.loading.module import Loaded as Loaded
    from convert.loading.tensors import StateDict as StateDict
    from convert.peft.write import AdapterResult as AdapterResult
    from convert.planning.options import ConversionOptions as ConversionOptions
    from convert.planning.plan import Plan as Plan
    from convert.references.protocol import Deferred as Deferred
    from convert.references.protocol import Observed as Observed
    from convert.references.protocol import Reference as Reference
    from convert.references.protocol import Variant as Variant
    from convert.references.pytree import fill_pytree as fill_pytree
    from convert.reversing.plan import ReversePlan as ReversePlan
    from convert.reversing.write import CheckpointResult as CheckpointResult
    from convert.rules.file import RuleFile as RuleFile
    from convert.rules.library import available_rules as available_rules
    from convert.rules.library import load_models as load_models
    from convert.rules.library import load_rules as load_rules
    from convert.rules.parse import parse_rules as parse_rules
    from convert.writing.execute import Event as Event
    from convert.writing.execute import Result as Result
    from convert.writing.execute import execute as execute

_MODULES = {
    "convert.api": (
        "convert",
        "convert_adapter",
        "convert_back",
        "load_into",
        "load_pytree",
        "plan_conversion",
        "plan_reverse",
        "state_dict",
    ),
    "convert.drafting": ("draft_rules",),
    "convert.core.errors": ("CheckpointError", "ConvertError", "OutputError", "PlanError", "RuleError"),
    "convert.loading.module": ("Loaded",),
    "convert.loading.tensors": ("StateDict",),
    "convert.peft.write": ("AdapterResult",),
    "convert.planning.options": ("ConversionOptions",),
    "convert.planning.plan": ("Plan",),
    "convert.reversing.plan": ("ReversePlan",),
    "convert.reversing.write": ("CheckpointResult",),
    "convert.rules.library": ("available_rules", "load_models", "load_rules"),
    "convert.rules.file": ("RuleFile",),
    "convert.rules.parse": ("parse_rules",),
    "convert.checkpoints": ("Format", "Leaf", "Options", "Source", "open_source"),
    "convert.core.tensor_spec": ("TensorSpec",),
    "convert.layers.base": ("Step",),
    "convert.writing.execute": ("Event", "Result", "execute"),
    "convert.drafting.survey": ("Survey", "survey_rules"),
    "convert.inference.derivation": ("Derivation",),
    "convert.inference.infer": ("infer",),
    "convert.references.protocol": ("Deferred", "Observed", "Reference", "Variant"),
    "convert.references.pytree": ("fill_pytree",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'convert' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
