"""Faults in the code of a decoder of plain functions, of which the reference returns the outputs alone."""

from __future__ import annotations

from faults.expected import Fault
from faults.plants import InTarget
from support.decoder import FAULTS

DECODER = tuple(
    Fault(name, "decoder", "torch", InTarget(edit), "model", "y", diagnosis)
    for name, (edit, diagnosis) in FAULTS.items()
)
