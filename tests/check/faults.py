"""The fault catalogue: mistakes that were made in real conversions, and what the check must say about each.

A new model family adds a list of its own to `FAULTS`; a small model with rules that are not shipped is declared in
`check.own_models` first.
"""

from __future__ import annotations

from check.expected import Fault
from check.faults_backends import BACKENDS
from check.faults_cde import CDE
from check.faults_cells import CELL_FAULTS
from check.faults_conv import CONV
from check.faults_encoder_decoder import ENCODER_DECODER
from check.faults_flax import FLAX
from check.faults_gemma import GEMMA
from check.faults_griffin import GRIFFIN
from check.faults_in_files import IN_FILES
from check.faults_in_rules import IN_RULES
from check.faults_in_targets import IN_REFERENCES, IN_TARGETS

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
)
