"""At least six faults of each Flax family that the rules of all families convert, planted in layers, config.json and rules."""

from __future__ import annotations

import pytest

from faults import flax_cases
from faults.catalogue import run_fault
from faults.planted.flax_families import faults_of
from support.marks import slow_but


@pytest.mark.parametrize("family", slow_but(["vit"], flax_cases.FAMILIES))
def test_each_fault_is_caught_and_named(family: str) -> None:
    faults = list(faults_of(flax_cases.case_of(family)))
    assert len(faults) >= 6 and len({fault.name for fault in faults}) == len(faults)
    problems = {fault.name: list(fault.problems(run_fault(fault))) for fault in faults}
    assert {name: said for name, said in problems.items() if said} == {}
    assert all(fault.diagnosis for fault in faults)
