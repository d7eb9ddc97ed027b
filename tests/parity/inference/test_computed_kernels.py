"""Parameters of which both programs compute a kernel before data meets it: no element of the kernel tells them apart, and the kernel does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import UNPROVEN, derive, floats, grades, rules

WIDTH, STATES, LENGTH = 6, 4, 9


class S4D(torch.nn.Module):
    """The diagonal state space layer, with C as pairs of numbers, as its authors store it."""

    def __init__(self, sign: float = -1.0) -> None:
        super().__init__()
        self.log_dt, self.D = (torch.nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.C = torch.nn.Parameter(torch.zeros(WIDTH, STATES, 2))
        self.log_A_real, self.A_imag = (torch.nn.Parameter(torch.zeros(WIDTH, STATES)) for _ in range(2))
        self.output, self.sign = torch.nn.Linear(WIDTH, WIDTH), sign

    def forward(self, x: Any) -> Any:
        x, length = x.transpose(1, 2), x.shape[1]
        of_state = self.sign * torch.exp(self.log_A_real) + 1j * self.A_imag
        steps = of_state * torch.exp(self.log_dt).unsqueeze(-1)
        powers = torch.exp(steps.unsqueeze(-1) * torch.arange(length))
        kernel = (
            2
            * torch.einsum("hn,hnl->hl", torch.view_as_complex(self.C) * (torch.exp(steps) - 1) / of_state, powers).real
        )
        y = torch.fft.irfft(torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel, n=2 * length), n=2 * length)
        return self.output((y[..., :length] + x * self.D.unsqueeze(-1)).transpose(1, 2))


LEAVES = {
    "log_dt": (WIDTH,),
    "d": (WIDTH,),
    **dict.fromkeys(("a_re", "a_im", "c_re", "c_im"), (WIDTH, STATES)),
    "w": (WIDTH, WIDTH),
    "b": (WIDTH,),
}


def s4d(w: Any, x: Any) -> Any:
    length = x.shape[1]
    of_state = -jnp.exp(w["a_re"]) + 1j * w["a_im"]
    steps = of_state * jnp.exp(w["log_dt"])[:, None]
    weights = (w["c_re"] + 1j * w["c_im"]) * (jnp.exp(steps) - 1) / of_state
    kernel = 2 * jnp.einsum("hn,hnl->hl", weights, jnp.exp(steps[..., None] * jnp.arange(length))).real
    given = jnp.fft.rfft(x.swapaxes(1, 2), n=2 * length) * jnp.fft.rfft(kernel, n=2 * length)
    y = jnp.fft.irfft(given, n=2 * length)[..., :length].swapaxes(1, 2) + x * w["d"]
    return y @ w["w"] + w["b"]


@pytest.mark.slow
def test_a_state_space_layer() -> None:
    module = S4D()
    found = derive(s4d, module, LEAVES, floats(2, LENGTH, WIDTH))
    assert grades(found) == {Grade.DERIVED}
    log_dt, pairs, of_state, output = rules(found, module)
    assert log_dt == '- from: "{log_dt,d}"\n  parameter: "{log_dt,D}"'
    assert pairs == '- from: c_{re,im}\n  axes: DC\n  parameter: {name: C, axes: "DC(1 + 1)"}'
    assert of_state == '- from: a_{re,im}\n  parameter: "{log_A_real,A_imag}"' and "linear: output" in output


@pytest.mark.slow
def test_another_kernel_is_a_difference() -> None:
    found = derive(s4d, S4D(sign=-0.5), LEAVES, floats(2, LENGTH, WIDTH))
    assert found.differences and grades(found) <= UNPROVEN


@pytest.mark.slow
@pytest.mark.parametrize("way", ["scan", "associative_scan"])
def test_a_linear_recurrent_unit(way: str) -> None:
    """Complex parameters of the module have two leaves each."""

    class LRU(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nu, self.theta, self.gamma = (torch.nn.Parameter(torch.zeros(STATES)) for _ in range(3))
            self.B = torch.nn.Parameter(torch.zeros(STATES, WIDTH, dtype=torch.cfloat))
            self.C = torch.nn.Parameter(torch.zeros(WIDTH, STATES, dtype=torch.cfloat))

        def forward(self, x: Any) -> Any:
            decay = torch.exp(torch.complex(-torch.exp(self.nu), torch.exp(self.theta)))
            taken = (torch.exp(self.gamma).unsqueeze(-1) * self.B).T
            state, outputs = torch.zeros(len(x), STATES, dtype=taken.dtype), []
            for t in range(x.shape[1]):
                state = decay * state + x[:, t].to(taken.dtype) @ taken
                outputs.append((state @ self.C.T).real)
            return torch.stack(outputs, 1)

    def function(w: Any, x: Any) -> Any:
        decay = jnp.exp(-jnp.exp(w["nu"]) + 1j * jnp.exp(w["theta"]))
        taken = jnp.einsum("nd,btd->btn", (w["b_re"] + 1j * w["b_im"]) * jnp.exp(w["gamma"])[:, None], x)
        if way == "scan":
            zeros = jnp.zeros_like(taken[:, 0])
            states = jax.lax.scan(lambda h, b: (decay * h + b,) * 2, zeros, taken.swapaxes(0, 1))[1].swapaxes(0, 1)
        else:
            pairs = jnp.broadcast_to(decay, taken.shape), taken
            join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
            states = jax.lax.associative_scan(join, pairs, axis=1)[1]
        return jnp.einsum("dn,btn->btd", w["c_re"] + 1j * w["c_im"], states).real

    leaves = {
        **dict.fromkeys(("nu", "theta", "gamma"), (STATES,)),
        **dict.fromkeys(("b_re", "b_im"), (STATES, WIDTH)),
        **dict.fromkeys(("c_re", "c_im"), (WIDTH, STATES)),
    }
    found = derive(function, LRU(), leaves, floats(2, 7, WIDTH))
    assert grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}


@pytest.mark.parametrize("first", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_gates_that_depend_on_time(first: float) -> None:
    """A continuous normalizing flow: each layer has a gate and a bias made of the time, which is 0 at first, so that a weight shows nothing there."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.gate = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(1, WIDTH)
            self.shift = torch.nn.Linear(1, WIDTH, bias=False)

        def forward(self, t: Any, x: Any) -> Any:
            return self.layer(x) * torch.sigmoid(self.gate(t.view(1, 1))) + self.shift(t.view(1, 1))

    class Flow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Gated() for _ in range(2))

        def forward(self, x: Any) -> Any:
            for step in range(3):
                t = torch.tensor(first + 0.25 * step, dtype=x.dtype)
                x = x + 0.25 * self.layers[1](t, torch.tanh(self.layers[0](t, x)))
            return x

    def function(w: Any, x: Any) -> Any:
        def layer(k: int, t: Any, x: Any) -> Any:
            gate = jax.nn.sigmoid(w[f"g{k}"] * t + w[f"gb{k}"])
            return (x @ w[f"w{k}"] + w[f"b{k}"]) * gate + w[f"s{k}"] * t

        def step(x: Any, t: Any) -> Any:
            return x + 0.25 * layer(1, t, jnp.tanh(layer(0, t, x))), None

        return jax.lax.scan(step, x, first + 0.25 * jnp.arange(3))[0]

    leaves: dict[str, tuple[int, ...]] = {}
    for k in range(2):
        leaves |= {f"w{k}": (WIDTH, WIDTH), **dict.fromkeys((f"b{k}", f"g{k}", f"gb{k}", f"s{k}"), (WIDTH,))}
    found = derive(function, Flow(), leaves, floats(5, WIDTH))
    assert grades(found) == {Grade.DERIVED} and found.tried < 60


class Decomposed(torch.nn.Module):
    """A matrix, and what a decomposition of it gives; no part of it is known before the whole is."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.w, self.what = torch.nn.Parameter(torch.zeros(WIDTH, WIDTH)), what

    def forward(self, x: Any) -> Any:
        if self.what == "spectral norm":
            return torch.nn.functional.linear(x, self.w / torch.linalg.matrix_norm(self.w, 2))
        if self.what == "nuclear norm":
            return torch.nn.functional.linear(x, self.w / torch.linalg.matrix_norm(self.w, "nuc"))
        if self.what == "eigenvalues":
            return x * torch.linalg.eigvalsh(self.w + self.w.T)
        return x * torch.linalg.svdvals(self.w)


DECOMPOSED = {
    "spectral norm": lambda w, x: x @ (w["w"] / jnp.linalg.norm(w["w"], ord=2)),
    "nuclear norm": lambda w, x: x @ (w["w"] / jnp.linalg.norm(w["w"], ord="nuc")),
    "eigenvalues": lambda w, x: x * jnp.linalg.eigvalsh(w["w"] + w["w"].T),
    "singular values": lambda w, x: x * jnp.linalg.svd(w["w"], compute_uv=False),
}


@pytest.mark.parametrize("what", DECOMPOSED)
def test_what_a_decomposition_of_a_parameter_gives(what: str) -> None:
    """It does not run on numbers that are not known yet: infer ended with an internal error."""
    found = derive(DECOMPOSED[what], Decomposed(what), {"w": (WIDTH, WIDTH)}, floats(3, 5, WIDTH))
    alike = what in ("eigenvalues", "singular values")  # those of the transpose are the same
    assert found.complete and grades(found) == {Grade.INTERCHANGEABLE if alike else Grade.DERIVED}


def test_another_norm_of_a_decomposition_is_a_difference() -> None:
    """The planted fault."""
    module, of_source = Decomposed("spectral norm"), DECOMPOSED["nuclear norm"]
    found = derive(of_source, module, {"w": (WIDTH, WIDTH)}, floats(3, 5, WIDTH))
    assert not found.complete and [x.brief for x in found.differences] == [
        "the target computes largest, the JAX model sum"
    ]
