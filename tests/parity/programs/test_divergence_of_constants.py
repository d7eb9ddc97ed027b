"""Another constant beside parameters, as a norm's epsilon: it is named as that, however either side folds the scale into the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

from convert.numerics.compare import difference
from convert.programs.divergence.naming.operations import CONSTANT
from convert.programs.divergence.search import diverge
from convert.programs.divergence.wording import Named
from convert.verify.diagnosis.other_operation import SHARE, departs
from support.small_faults import Arrays, records, said

FORMS = ("x*rsqrt", "x/sqrt", "folded rsqrt", "folded sqrt")
Norm = Callable[[Any, str, Arrays, Any, float], Any]


def scaled(of: Any, form: str, x: Any, moment: Any, scale: Any) -> Any:
    rsqrt = torch.rsqrt if of is torch else jax.lax.rsqrt
    if form == "x*rsqrt":
        return x * rsqrt(moment) * scale
    if form == "x/sqrt":
        return x / of.sqrt(moment) * scale
    return x * (rsqrt(moment) * scale) if form == "folded rsqrt" else x * (scale / of.sqrt(moment))


def mean(x: Any) -> Any:
    return x.mean(-1)[..., None]


def batch_norm(of: Any, form: str, p: Arrays, x: Any, epsilon: float) -> Any:
    return scaled(of, form, x - p["rel"][:8], abs(p["g"]) + epsilon, p["h"])


def rms_norm(of: Any, form: str, p: Arrays, x: Any, epsilon: float) -> Any:
    return scaled(of, form, x, mean(x * x) + epsilon, p["h"])


def layer_norm(of: Any, form: str, p: Arrays, x: Any, epsilon: float) -> Any:
    return rms_norm(of, form, p, x - mean(x), epsilon)


def group_norm(of: Any, form: str, p: Arrays, x: Any, epsilon: float) -> Any:
    groups = x.reshape(*x.shape[:-1], 2, 4)
    groups = groups - mean(groups)
    return scaled(of, form, groups, mean(groups * groups) + epsilon, p["h"].reshape(2, 4)).reshape(x.shape)


TORCH: dict[Norm, Callable[[Arrays, Any, float], Any]] = {
    batch_norm: lambda p, x, e: functional.batch_norm(x.mT, p["rel"][:8], abs(p["g"]), p["h"], eps=e).mT,
    rms_norm: lambda p, x, e: functional.rms_norm(x, (8,), p["h"], e),
    layer_norm: lambda p, x, e: functional.layer_norm(x, (8,), p["h"], eps=e),
    group_norm: lambda p, x, e: functional.group_norm(x.reshape(-1, 8), 2, p["h"], eps=e).reshape(x.shape),
}


def found(norm: Norm, form: str, target: Callable[[Arrays, Any, float], Any]) -> Named | None:
    """What is said of an epsilon of 1e-3 in the target."""
    return said(
        lambda p, x, real: jnp.tanh(norm(jnp, form, p, x @ p["w"], 1e-5)) @ p["v"],
        lambda p, x, real: torch.tanh(target(p, x @ p["w"], 1e-3)) @ p["v"],
    )


def is_epsilon(one: Named | None) -> bool:
    if one is None or one.name != CONSTANT or "; and" in one.problem or "multiplies" in one.problem + one.fix:
        return False
    return "adds 0.001 (" in one.problem and "the JAX model adds 1e-05" in one.problem


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_the_epsilon_of_a_batch_norm(form: str, other: str) -> None:
    one = found(batch_norm, form, lambda p, x, e: batch_norm(torch, other, p, x, e))
    assert is_epsilon(one) and one is not None and "(it adds 1e-05)" in one.fix


@pytest.mark.parametrize("form", ["x/sqrt", "folded rsqrt"])
@pytest.mark.parametrize("norm", TORCH)
def test_the_epsilon_of_a_norm_of_torch(norm: Norm, form: str) -> None:
    assert is_epsilon(found(norm, form, TORCH[norm]))


def linen(p: Arrays, x: Any, epsilon: float) -> Any:
    return (x - p["rel"][:8]) * (jax.lax.rsqrt(p["g"].reshape(1, 8) + epsilon) * p["h"].reshape(1, 8))


def test_the_parameter_that_it_is_added_to_is_named() -> None:
    one = said(
        lambda p, x, real: linen(p, x @ p["w"], 1e-5) @ p["v"],
        lambda p, x, real: functional.batch_norm((x @ p["w"]).mT, p["rel"][:8], p["g"], p["h"], eps=1e-3).mT @ p["v"],
    )
    assert one is not None and one.problem.startswith("of g, the target adds 0.001 (")


def divided(p: Arrays, x: Any, epsilon: float) -> Any:
    """What takes the scale of a RevIN back."""
    return x @ p["w"] / (p["g"] + epsilon)


def test_advice_names_the_operation_that_is_wrong() -> None:
    one = said(lambda p, x, real: divided(p, x, 1e-10), lambda p, x, real: divided(p, x, 1e-5))
    assert one is not None and one.name == CONSTANT and "(it adds 1e-10)" in one.fix
    # Beside another fault, the numbers of the operation on data are compared: the advice must not repeat that operation.
    two = said(lambda p, x, real: jnp.tanh(divided(p, x, 1e-10)) @ p["v"], lambda p, x, real: torch.sigmoid(divided(p, x, 1e-5)) @ p["v"])  # fmt: skip
    assert two is not None and "adds 1e-10" in two.problem and "divides" not in two.fix


def test_another_variance_is_no_epsilon() -> None:
    """The constants are not those of the same values."""
    one = found(batch_norm, "folded rsqrt", lambda p, x, e: batch_norm(torch, "folded rsqrt", {**p, "g": p["h"]}, x, e))
    assert one is None or not is_epsilon(one)


def response_norm(p: Arrays, x: Any, real: Any, epsilon: float) -> Any:
    """As in ConvNeXt V2, of two images: the mean is one number for each."""
    y = (x @ p["w"])[:2]
    g = (y**2).sum(1) ** 0.5
    return y * (g / (mean(g) + epsilon))[:, None] + y


def test_of_a_mean_that_is_few_numbers_the_epsilon_is_said() -> None:
    """So few numbers are no evidence that the JAX model has them; it was said that the target has no epsilon at all."""
    found = said(lambda p, x, real: response_norm(p, x, real, 1e-6), lambda p, x, real: response_norm(p, x, real, 1e-5))
    assert found is not None
    assert "the target takes the mean over the last axis, adds 1e-05, divides" in found.problem
    assert "the JAX model sums over the last axis, divides by 8, adds 1e-06, divides" in found.problem


def by_its_mean(x: Any, epsilon: float) -> Any:
    return x / (mean(abs(x)) + epsilon)


def cancelled(p: Arrays, x: Any, epsilon: float) -> Any:
    """A norm of large values, of which nearly all is taken away; then another norm."""
    y = (x @ p["w"]) * 1e3
    left = by_its_mean(y, epsilon) - 0.999 * y / mean(abs(y))
    return by_its_mean(left * 2e3, epsilon) @ p["v"]


def test_an_epsilon_is_named_where_its_error_is_small_yet() -> None:
    """Behind the first norm the values seem equal, but for what a second, finer comparison shows."""
    source, target = records(lambda p, x, real: cancelled(p, x, 1e-6), lambda p, x, real: cancelled(p, x, 1e-5))
    want, got = source.outputs["y"].array, target.outputs["y"].array

    def error(array: Any) -> float:
        return difference(array, want).relative

    coarse = diverge(source, target, "y", error, 1e-9, SHARE * error(got))
    assert coarse is not None and len({one.target[-1].where for one in coarse.repairs}) > 1
    found = departs(torch.nn.Module(), source, target, "y", error, 1e-9).explanation
    assert found is not None and found.name == CONSTANT
    assert "adds 1e-05" in found.problem and "adds 1e-06" in found.problem and "subtract" not in found.problem
