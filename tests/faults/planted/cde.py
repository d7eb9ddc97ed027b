"""Faults of paths through data and of neural CDEs: of the example ``cde``, of stored paths, and of diffrax#619."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torchcde

from convert.references import neural_cde as paths
from faults.cde_models import model_jax
from faults.expected import Fault
from faults.own_models import example
from faults.plants import InFile, InReference, InRule, InTarget, attribute, tensor

LINEAR, CUBIC, STORED, VECTOR = "cde-linear", "cde-cubic", "cde-paths", "diffrax-derivative"
WHOLE = torch.bucketize


def in_target(name: str, case: str, edit: Callable[[Any], None], at: str, diagnosis: str) -> Fault:
    return Fault(name, case, "torch", InTarget(edit), "model", at, diagnosis)


def built(make: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[Any], None]:
    """An edit of how the model makes its path."""

    def edit(module: Any) -> None:
        module.path = lambda ts, ys: make(ts, ys)

    return edit


def changed(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """An edit of the path that the model makes."""

    def edit(module: Any) -> None:
        own = module.path
        module.path = lambda ts, ys: change(own(ts, ys))

    return edit


def right_derivative(path: Any) -> Any:
    """The piece behind a knot."""

    def interpret(t: torch.Tensor) -> Any:
        t = torch.as_tensor(t, dtype=path._derivs.dtype)
        index = WHOLE(t, path._t, right=True).sub(1).clamp(0, path._derivs.size(-2) - 1)
        return t - path._t[index], index

    path._interpret_t = interpret
    return path


class Held:
    """A path that stands still outside its knots."""

    def __init__(self, path: Any) -> None:
        self.own = path

    def evaluate(self, t: torch.Tensor) -> torch.Tensor:
        return self.own.evaluate(torch.as_tensor(t).clamp(*self.own.interval))

    def derivative(self, t: torch.Tensor) -> torch.Tensor:
        low, high = self.own.interval
        slope = self.own.derivative(torch.as_tensor(t).clamp(low, high))
        return slope * ((t >= low) & (t <= high))[..., None]


def hermite(ts: torch.Tensor, ys: torch.Tensor, order: str = "abcd", factors: tuple[float, ...] = (1, 1, 1, 1)) -> Any:
    """torchcde's path with its four coefficients in another order, or divided."""
    made = torchcde.hermite_cubic_coefficients_with_backward_differences(ys, ts).chunk(4, -1)
    parts = [made["abcd".index(x)] / f for x, f in zip(order, factors, strict=True)]
    return torchcde.CubicSpline(torch.cat(parts, -1), ts)


def exchanged(ts: torch.Tensor, ys: torch.Tensor, kind: str = "linear") -> Any:
    """Time and series exchanged on the way in, and back on the way out: there are as many of both."""
    given = ys.transpose(0, 1)
    own = torchcde.LinearInterpolation(given, ts) if kind == "linear" else hermite(ts, given)

    class Back:
        def evaluate(self, t: torch.Tensor) -> torch.Tensor:
            y = own.evaluate(t)
            return y.transpose(0, -2) if t.ndim else y

        def derivative(self, t: torch.Tensor) -> torch.Tensor:
            y = own.derivative(t)
            return y.transpose(0, -2) if t.ndim else y

    return Back()


def channels_first(module: Any) -> None:
    """The rows of the field's last layer taken for (channels, hidden)."""
    field = module.field

    def forward(t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        for layer in field.layers[:-1]:
            z = torch.nn.functional.softplus(layer(z))
        hidden, channels = field.shape
        return torch.tanh(field.layers[-1](z)).unflatten(-1, (channels, hidden)).transpose(-1, -2)

    field.forward = forward


def increments() -> AbstractContextManager[Any]:
    import diffrax

    def terms(model: Any, path: Any) -> Any:
        return diffrax.ControlTerm(lambda t, z, args: model.field(z), path)

    return mock.patch.object(model_jax, "terms", terms)


def vectorised() -> AbstractContextManager[Any]:
    module = example("bugs/diffrax-derivative", "model_jax")
    return mock.patch.object(module, "right_slopes", module.wrong_slopes)


def quarters(*order: int, factors: tuple[float, ...] = (1, 1, 1, 1)) -> Callable[[np.ndarray], np.ndarray]:
    """The four coefficients of a written tensor in another order, each divided by a factor first."""

    def edit(x: np.ndarray) -> np.ndarray:
        parts = [part / np.float32(f) for part, f in zip(np.split(x, 4, -1), factors, strict=True)]
        return np.concatenate([parts[k] for k in order], -1).astype(x.dtype)

    return edit


def in_file(name: str, edit: Callable[[np.ndarray], np.ndarray], diagnosis: str) -> Fault:
    plant = InFile(tensor("cubic.coeffs", edit))
    said = ("cubic", "another value in the file")
    return Fault(name, STORED, "torch", plant, "weights", "cubic.coeffs", diagnosis, said)


def in_rule(name: str, more: str, diagnosis: str) -> Fault:
    """The file is what the rule says, so that only the models tell."""
    return Fault(
        name, STORED, "torch", InRule((("  from: cubic\n", f"  from: cubic\n{more}\n"),)), "model", "cubic", diagnosis
    )


PLAIN = (1, 1, 2, 3)
AS_STORED = "coefficients in another order"
TIME_AXIS = "time axis exchanged with another one"

CDE: tuple[Fault, ...] = (
    in_target("right derivative for the left one", LINEAR, changed(right_derivative), "slope", paths.RIGHT),
    in_target("times left out: 0, 1, 2, ...", LINEAR, built(lambda ts, ys: torchcde.LinearInterpolation(ys)), "value", paths.UNIT),
    in_target("path held constant outside its knots", LINEAR, changed(Held), "value", paths.CONSTANT_OUTSIDE),
    in_target("time and batch axes exchanged", LINEAR, built(exchanged), "value", paths.EXCHANGED),
    in_target("cubic for linear path", LINEAR, built(hermite), "value", paths.HERMITE),
    in_target("linear for cubic path", CUBIC, built(lambda ts, ys: torchcde.LinearInterpolation(ys, ts)), "value", paths.LINEAR),
    in_target("natural for backward-Hermite cubic", CUBIC, built(lambda ts, ys: torchcde.CubicSpline(torchcde.natural_cubic_coeffs(ys, ts), ts)), "value", paths.NATURAL),
    in_target("factors 2 and 3 missing", CUBIC, built(lambda ts, ys: hermite(ts, ys, factors=PLAIN)), "value", paths.FACTORS),
    in_target("coefficients in the order d, c, b, a", CUBIC, built(lambda ts, ys: hermite(ts, ys, "dcba", PLAIN[::-1])), "value", paths.ORDER),
    in_target("times left out: 0, 1, 2, ...", CUBIC, built(lambda ts, ys: torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(ys))), "value", paths.UNIT),
    in_target("path held constant outside its knots", CUBIC, changed(Held), "value", paths.CONSTANT_OUTSIDE),
    in_target("time and batch axes exchanged", CUBIC, built(partial(exchanged, kind="cubic")), "value", paths.EXCHANGED),
    in_target("field reshaped to (channels, hidden)", CUBIC, channels_first, "field", "rows (channels, hidden)"),
    in_target("Euler's method for the midpoint method", CUBIC, attribute("method", "euler"), "states", "Euler"),
    in_target("torchdiffeq's rk4 (the 3/8 rule) for the midpoint method", CUBIC, attribute("method", "rk4"), "states", "RK4, 3/8 rule"),
    Fault("increments of the path for its derivative", CUBIC, "torch", InReference(increments), "model", "states", f"{paths.INCREMENTS}, in the JAX model"),
    Fault("derivative at all times at once: (T, T)", VECTOR, "torch", InReference(vectorised), "model", "slope", f"{paths.BROADCAST}, in the JAX model"),
    in_file("coefficients in the order d, c, b, a", quarters(3, 2, 1, 0, factors=PLAIN), AS_STORED),
    in_file("coefficients in the order a, b, 3d, 2c", quarters(0, 1, 3, 2), AS_STORED),
    in_file("factors 2 and 3 missing", quarters(0, 1, 2, 3, factors=PLAIN), "factors 2 and 3 missing"),
    in_file("time axis exchanged with the series", lambda x: x.swapaxes(0, 1), TIME_AXIS),
    in_rule("coefficients taken for a, b, c, d", "  leaves: {a: coeffs/0, b: coeffs/1, c: coeffs/2, d: coeffs/3}", AS_STORED),
    in_rule("time axis said to be the first", "  data: TNC", TIME_AXIS),
    Fault("time axis of knots said to be the first", STORED, "torch", InRule((("  from: linear\n", "  from: linear\n  data: TNC\n"),)), "plan", "linear/ys", "refused"),
)  # fmt: skip
