"""The fault catalogue: mistakes that were made in real conversions, and what the check must say about each.

A new model family adds a list of its own to `FAULTS`; a small model with rules that are not shipped is declared in
`faults.own_models` first.
"""

from __future__ import annotations

from faults.expected import Fault
from faults.planted.backends import BACKENDS
from faults.planted.cde import CDE
from faults.planted.cells import CELL_FAULTS
from faults.planted.choices import CHOICE_FAULTS
from faults.planted.conv import CONV
from faults.planted.decoder import DECODER
from faults.planted.encoder_decoder import ENCODER_DECODER
from faults.planted.flax import FLAX
from faults.planted.gemma import GEMMA
from faults.planted.griffin import GRIFFIN
from faults.planted.in_configs import IN_CONFIGS
from faults.planted.in_facts import IN_FACTS
from faults.planted.in_files import IN_FILES
from faults.planted.in_rules import IN_RULES
from faults.planted.in_targets import IN_REFERENCES, IN_TARGETS
from faults.planted.modules import MODULES
from faults.planted.of_others import OF_OTHERS
from faults.planted.orders import ORDERS
from faults.planted.outputs_alone import OUTPUTS_ALONE
from faults.planted.references import REFERENCES
from faults.planted.rope import ROPE
from faults.planted.series import SERIES_FAULTS
from faults.planted.small import SMALL_FAULTS
from faults.planted.steps import STEP_FAULTS
from faults.planted.values import VALUES

__all__ = ["FAULTS", "Fault"]

FAULTS: tuple[Fault, ...] = (
    *IN_RULES,
    *IN_FILES,
    *IN_TARGETS,
    *IN_REFERENCES,
    *GRIFFIN,
    *GEMMA,
    *FLAX,
    *ENCODER_DECODER,
    *CONV,
    *CELL_FAULTS,
    *CDE,
    *BACKENDS,
    *ROPE,
    *IN_CONFIGS,
    *IN_FACTS,
    *VALUES,
    *ORDERS,
    *OF_OTHERS,
    *OUTPUTS_ALONE,
    *MODULES,
    *DECODER,
    *REFERENCES,
    *SMALL_FAULTS,
    *SERIES_FAULTS,
    *STEP_FAULTS,
    *CHOICE_FAULTS,
)
