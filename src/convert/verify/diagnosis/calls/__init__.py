"""How the target's code calls torch and its libraries: each search runs the whole model with other calls.

recurrent.py turns sequences, leaves out their padding and exchanges states of torch's recurrent layers, choice.py takes another number of largest values,
other_module.py calls modules that the target never calls. `other_call` runs all; they import torch, so it imports them where it runs.
"""

from __future__ import annotations

from convert.references.protocol import Reference
from convert.verify.diagnosis.compare import Search
from convert.verify.diagnosis.site import Site


def other_call(site: Site, reference: Reference) -> Search:
    """Return the first explanation that another call gives."""
    from convert.verify.diagnosis.calls.choice import other_choice
    from convert.verify.diagnosis.calls.other_module import other_module
    from convert.verify.diagnosis.calls.recurrent import other_states

    ruled_out: tuple[str, ...] = ()
    for search in (other_states, other_choice, other_module):
        found = search(site, reference)
        ruled_out += found.ruled_out
        if found.explanation is not None:
            return Search(found.explanation, ruled_out)
    return Search(ruled_out=ruled_out)
