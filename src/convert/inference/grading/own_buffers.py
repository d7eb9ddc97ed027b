"""Buffers of the module that only conditions use, such as the causal mask that GPT saves as floats: they are its own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from convert.inference.derivation import Arithmetic, Evidence, Grade, Part, Role, Site, Tensor
from convert.programs.program import Program


def with_own_buffers(tensors: Sequence[Tensor], target: Program, searched: Program) -> tuple[Tensor, ...]:
    """Return the tensors; a buffer that the search does not see, as conditions are constants there, is what the module has.

    Args:
        target: the record, as it ran.
        searched: the record in the form of the search.
    """
    users, left = target.users, searched.users
    found = []
    for tensor in tensors:
        value = target.parameters.get(tensor.name)
        if value is None or tensor.parts or tensor.name not in target.buffers or value not in users or value in left:
            found.append(tensor)
            continue
        reads = users[value][0]
        site = Site("target", 0, reads.name, reads.where, reads.module)
        evidence = Evidence(Role.OTHER, None, site, "", "the module computes it itself")
        numbers, nothing = np.arange(value.array.size), np.zeros(0, int)
        own = Part(numbers, "", nothing, Arithmetic.OWN, evidence, values=value.array.astype(np.float64).ravel())
        found.append(replace(tensor, parts=(own,), grade=Grade.DERIVED, unread=False, candidates=()))
    return tuple(found)
