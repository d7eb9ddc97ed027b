"""A record has no complex values: what was complex is real arithmetic on two parts, which gives the same and can be run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

from convert.numerics.real_numbers import as_complex, as_real
from convert.programs.program import Program
from convert.programs.record_jax import record_jax
from convert.programs.record_torch import record_torch
from convert.programs.rerun import rerun

RNG = np.random.default_rng(0)
A, B = (RNG.normal(size=(4, 4)) for _ in range(2))
W = A + 1j * B


def numbers(*shape: int) -> Any:
    return RNG.normal(size=shape) + 1j * RNG.normal(size=shape)


JAX: dict[str, Callable[[Any, Any], Any]] = {
    "products": lambda w, x: (x @ w["w"]) * jnp.einsum("ij,kj->ik", x, w["w"].conj()),
    "two leaves": lambda w, x: x @ (w["a"] + 1j * w["b"]) - 1j * w["a"][0] * 2,
    "quotients": lambda w, x: x / w["w"][0] + 2 / x - x / w["a"][0],
    "exponentials": lambda w, x: jnp.exp(x) + jnp.exp(1j * w["a"][0]) * jnp.abs(x) + jnp.angle(x),
    "spectra": lambda w, x: jnp.fft.ifft(jnp.fft.fft(x) * w["w"][1]),
    "moved": lambda w, x: jnp.where(x.real > 0, x, 0).T @ jnp.concatenate([x, w["w"][:1]])[1:].reshape(x.shape),
    "written": lambda w, x: jnp.zeros((4, 5), complex).at[:3, :4].set(x) + jnp.pad(w["w"], ((0, 0), (1, 0))),
    "powers": lambda w, x: x**2 + jnp.square(w["w"][0]) + x**3 + jnp.log(w["w"][0]) + jnp.sqrt(x) + jnp.tanh(x),
    "sums": lambda w, x: x.sum(-1, keepdims=True) + jnp.cumsum(x, 0) + x.mean(0) - 1 + lax.complex(w["a"], w["b"])[0],
    "rounds": lambda w, x: lax.reduce_precision(x.real, 8, 23) + (x * w["w"][2]).imag,
}


class Module(torch.nn.Module):
    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.w = torch.nn.Parameter(torch.as_tensor(W).to(torch.complex64))
        self.pairs = torch.nn.Parameter(torch.view_as_real(torch.as_tensor(W)).float())
        self.a, self.b = (torch.nn.Parameter(torch.as_tensor(x).float()) for x in (A, B))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.function(self, x)
        return made


def assigned(m: Module, x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(3, 5, dtype=x.dtype)
    made[:, :4] = x * m.w[0]
    made.real[:, 4] = m.a[0, 0]
    made[:, 1].imag.mul_(2)
    return made.conj().mul_(2)


TORCH: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "products": lambda m, x: (x @ m.w) * torch.einsum("ij,kj->ik", x, m.w.conj())[:, :4] + m.b[0],
    "two parameters": lambda m, x: x @ torch.complex(m.a, m.b) + torch.addmm(m.w[0], x, m.w, beta=2, alpha=0.5),
    "pairs": lambda m, x: torch.view_as_real(x * torch.view_as_complex(m.pairs)[0]),
    "quotients": lambda m, x: x / m.w[0] + m.w[0].reciprocal() - x / m.a[0],
    "exponentials": lambda m, x: torch.exp(x) + torch.polar(m.a[0].abs(), m.b[0]) * x.abs() + x.angle(),
    "spectra": lambda m, x: torch.fft.ifft(torch.fft.fft(x) * m.w[1], norm="ortho"),
    "moved": lambda m, x: torch.where(x.real > 0, x, 0).mH @ torch.cat([x, m.w[:1]]).flip(0)[1:].reshape(x.shape),
    "powers": lambda m, x: x**2 + m.w[0].square() + x**3 + m.w[0].log() + x.sqrt() + x.tanh() + x.sgn(),
    "sums": lambda m, x: x.sum(-1, keepdim=True) + x.cumsum(0) + x.mean(0) - 1 + torch.sub(x, m.w[0], alpha=2),
    "assigned": assigned,
    "parts": lambda m, x: x.real * (x * m.w[0]).imag + x.conj().imag,
}  # fmt: skip


def check(program: Program, expected: Any, again: Callable[[Any, Any], Any]) -> None:
    values = [x for operation in program.operations for x in (*operation.operands, *operation.results)]
    assert not [x for x in (*values, *program.outputs.values()) if x.array.dtype.kind == "c"]
    np.testing.assert_allclose(program.outputs["y"].given, expected, rtol=1e-9, atol=1e-9)
    flat = np.concatenate([x.array.ravel() for x in program.parameters.values()])
    for value in values:  # a value that is one factor of elements has their numbers
        if value.of_parameters and len(value.elements) == 1 and value.array.dtype.kind == "f":
            assert value.elements[0].shape == value.array.shape
            assert value.elements[0].max() < len(flat)
    x, w = numbers(3, 4), {name: value.given + 0.1 for name, value in program.parameters.items()}
    made = rerun(program, w, {"x": x}).outputs["y"].given
    np.testing.assert_allclose(made, again(w, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", JAX)
def test_a_jax_function_in_real_numbers(case: str) -> None:
    def function(w: Any, i: Any) -> Any:
        return {"y": JAX[case](w, i["x"])}

    x = numbers(3, 4)
    leaves = {"w": W, "a": A, "b": B}
    run = lambda w, x: record_jax(function, w, {"x": x}, twice=False).outputs["y"].given  # noqa: E731
    check(record_jax(function, leaves, {"x": x}), run(leaves, x), run)


@pytest.mark.parametrize("case", TORCH)
def test_a_pytorch_module_in_real_numbers(case: str) -> None:
    module, x = Module(TORCH[case]).eval(), numbers(3, 4)

    def run(w: Any, x: Any) -> Any:
        own = Module(TORCH[case]).double()
        for name, array in w.items():
            getattr(own, name).data = torch.as_tensor(array)
        with torch.no_grad():
            return own(torch.as_tensor(x)).resolve_conj().numpy()

    own = {name: value.detach().numpy() for name, value in module.named_parameters()}
    wide = {name: x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for name, x in own.items()}
    program = record_torch(module, lambda m, given: {"y": m(given["x"])}, {"x": x})
    check(program, run(wide, x), run)


def test_the_numbers_of_a_complex_leaf_are_those_of_its_parts() -> None:
    program = record_jax(
        lambda w, i: {"y": (i["x"] @ w["w"].T).real * w["a"][0, 0]}, {"w": W, "a": A}, {"x": numbers(3, 4)}
    )
    flat = np.concatenate([as_real(W).ravel(), A.ravel()])
    seen = [x for o in program.operations for x in o.operands if x.of_parameters and len(x.elements) == 1]
    assert len(seen) > 3
    for value in seen:
        np.testing.assert_allclose(value.array, flat[value.elements[0]])
    assert np.array_equal(as_complex(program.parameters["w"].array), W)


def test_what_is_not_used_of_a_complex_product_is_not_recorded() -> None:
    def real(w: Any, i: Any) -> Any:
        return {"y": i["x"].real @ w["a"] - i["x"].imag @ w["b"]}

    def whole(w: Any, i: Any) -> Any:
        return {"y": (i["x"] @ lax.complex(w["a"], w["b"])).real}

    made = [record_jax(f, {"a": A, "b": B}, {"x": numbers(3, 4)}) for f in (real, whole)]
    names = [[o.name for o in program.operations] for program in made]
    assert names[0].count("dot_general") == names[1].count("dot_general") == 2
