"""Tensors that were guessed are graded as any others where the programs turn out to be equal."""

from __future__ import annotations

import numpy as np
import torch

from convert.inference.derivation import Arithmetic, Evidence, Grade, Part, Role, Site, Tensor
from convert.inference.grading.differences.guessed import of_equal_programs
from convert.programs.record_jax import record_jax
from convert.programs.record_torch import record_torch


def test_a_guess_of_which_a_pattern_fills_some_elements_is_derived() -> None:
    rng = np.random.default_rng(0)
    given, weights = {"x": rng.normal(size=(5, 4))}, {"w": rng.normal(size=(4, 3))}
    source = record_jax(lambda w, x: {"y": x["x"] @ w["w"]}, weights, given)
    module = torch.nn.Linear(4, 3, bias=False).double()
    target = record_torch(module, lambda net, x: {"y": net(x["x"])}, given)
    evidence = Evidence(Role.PRODUCT, None, Site("target", 0, "mm"), "", "")
    transposed = np.arange(12).reshape(4, 3).T.ravel()
    part = Part(np.arange(12), "w", transposed, Arithmetic.SAME, evidence)
    guess = Tensor("weight", (3, 4), Grade.BEHIND, (part,), unseen=2, guessed=True)
    made = of_equal_programs([guess], source, target)
    assert made is not None and made[0].grade is Grade.DERIVED and not made[0].guessed
    wrong = Tensor(
        "weight", (3, 4), Grade.BEHIND, (Part(np.arange(12), "w", np.arange(12), Arithmetic.SAME, evidence),)
    )
    assert of_equal_programs([wrong], source, target) is None
