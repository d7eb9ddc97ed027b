"""What a diagnosis says of mistakes in the code of small models: the lines, the heads, the positions, what is given to whom."""

from __future__ import annotations

import pytest

from faults.catalogue import run
from faults.planted.small import SMALL_FAULTS
from faults.plants import InTarget

TEXTS = {
    "RoPE in front of the norm of keys alone": "with the norm in front of RoPE",
    "norms in front of RoPE": "k_norm.weight and q_norm.weight in front of RoPE",
    "RoPE positions of keys begin at one": "the target's positions begin at 1, and the JAX model's at 0",
    "RoPE exponents divided by H - 2": "10000 to the power -k/2 in the target, and -k/3 in the JAX model",
    "learned positions without their offset of two": "and the JAX model 2, 3, 4, 5, ...",
    "normaliser written as bfloat16 rounds it": "3.46875 is 3.464102 rounded to bfloat16, in the target",
    "weights of the experts with the balance bias": "weights what it chooses with balance added",
    "experts chosen without the balance bias": "the target never uses balance for an output",
    "three experts for two": "takes the 3 largest of 4 values",
    "the recurrence runs from the end": "the outputs are equal when it does so from the last on",
    "the second call begins with zeros": "begins with zeros; the outputs are equal when it begins with the last value of",
    "first states not given to the LSTM": "which the target does not use",
    "states of the LSTM exchanged": "rnn is given (c, h)",
    "the LSTM's sequence turned round": "axis 1, the sequence, of what rnn gives",
    "heads taken apart in front of the parts": "of each of the 2 heads (N) the rows of all 3 leaves",
    "dropout in eval mode": "small.py:",
    "softmax over the batch": "over axis 0",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_the_diagnosis_says_where(name: str) -> None:
    fault = next(fault for fault in SMALL_FAULTS if fault.name == name)
    found = run(fault.case, fault.to, fault.plant).levels[-1].diagnosis
    assert found is not None and TEXTS[name] in found["problem"], found


def test_a_cast_to_a_narrower_dtype_is_named_with_its_line() -> None:
    fault = next(fault for fault in SMALL_FAULTS if fault.name == "normaliser cast to bfloat16")
    (finding,) = run(fault.case, fault.to, fault.plant).levels[-1].findings
    assert "rounds 3.464102 to bfloat16, 3.46875" in finding.fix


@pytest.mark.slow
def test_positions_of_queries_and_keys_that_begin_later_are_the_same_function() -> None:
    def later(module: object) -> None:
        module.first_q = module.first_k = 3  # type: ignore[attr-defined]

    assert run("norm-rope", "torch", InTarget(later)).exit_code == 0


@pytest.mark.slow
def test_a_tensor_that_is_never_used_is_named_with_the_missing_operation() -> None:
    def without_types(module: object) -> None:
        module.embedded = lambda tokens, types: module.tokens(tokens)  # type: ignore[attr-defined]

    found = run("parts", "torch", InTarget(without_types)).levels[-1].diagnosis
    assert found is not None and found["name"] == "operation missing", found
    assert "the target never uses types.weight for an output" in found["problem"], found
