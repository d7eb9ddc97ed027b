"""Faults in the code of a decoder of plain functions, of which the reference returns the outputs alone."""

from __future__ import annotations

from faults.expected import Fault
from faults.plants import InTarget
from support.decoder import FAULTS

# What the whole check says more of than the search that test_divergence.py tests. With outputs alone, the first is the same function
# as one whose rules exchange the two weights, and the check names the rules first.
SAID = {
    "SiLU on the wrong factor": "modules exchanged",
    "RoPE of another base": "RoPE of another base",
    "key heads repeated in turns": "heads repeated in another order",
    "norm behind the addition": "norm behind the addition, not in front of the layer",
}
DECODER = tuple(
    Fault(name, "decoder", "torch", InTarget(edit), "model", "y", SAID.get(name, diagnosis))
    for name, (edit, diagnosis) in FAULTS.items()
)
