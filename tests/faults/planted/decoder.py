"""Faults in the code of a decoder of plain functions, of which the reference returns the outputs alone."""

from __future__ import annotations

from faults.expected import Fault
from faults.plants import InTarget
from support.decoder import FAULTS

# With outputs alone it is the same function as one whose rules exchange the two weights, and the check names the rules first.
AS_RULES = {"SiLU on the wrong factor": "modules exchanged"}
DECODER = tuple(
    Fault(name, "decoder", "torch", InTarget(edit), "model", "y", AS_RULES.get(name, diagnosis))
    for name, (edit, diagnosis) in FAULTS.items()
)
