"""Pairs of small models with complex values, as users write them: a JAX function of (leaves, x), and a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

Weights = Mapping[str, Any]
D, T, HEADS, STATES, MODES, POINTS, CHANNELS = 8, 6, 2, 5, 3, 12, 4

# ---- RoPE: Llama's `freqs_cis`, or sines and cosines of interleaved pairs


def angles(count: int, width: int) -> Any:
    return jnp.outer(jnp.arange(count), 1 / 1e4 ** (jnp.arange(0, width, 2) / width))[None, :, None]


def turned(x: Any) -> Any:
    c, s = (f(angles(x.shape[1], x.shape[-1])) for f in (jnp.cos, jnp.sin))
    one, two = x[..., 0::2], x[..., 1::2]
    return jnp.stack([one * c - two * s, one * s + two * c], -1).reshape(x.shape)


def turned_as_complex(x: Any) -> Any:
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    z = jax.lax.complex(pairs[..., 0], pairs[..., 1]) * jnp.exp(1j * angles(x.shape[1], x.shape[-1]))
    return jnp.stack([z.real, z.imag], -1).reshape(x.shape)


def attention(rope: Callable[[Any], Any]) -> Callable[[Weights, Any], Any]:
    def function(w: Weights, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
        scores = jnp.einsum("bthk,bshk->bhts", rope(q), rope(k)) / np.sqrt(D // HEADS)
        return jnp.einsum("bhts,bshk,hkd->btd", jax.nn.softmax(scores, -1), v, w["o"])

    return function


ATTENTION = {**dict.fromkeys("qkv", (D, HEADS, D // HEADS)), "o": (HEADS, D // HEADS, D)}


class Attention(nn.Module):
    """Llama's attention. `turn` changes what the keys are multiplied by."""

    def __init__(self, turn: Callable[[Tensor], Tensor] = lambda z: z, *, as_complex: bool = True) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))
        width = D // HEADS
        self.angles = torch.outer(torch.arange(T).double(), 1 / 1e4 ** (torch.arange(0, width, 2).double() / width))
        self.turn, self.as_complex = turn, as_complex

    def rope(self, x: Tensor, turn: Callable[[Tensor], Tensor] = lambda z: z) -> Tensor:
        if self.as_complex:
            freqs_cis = turn(torch.polar(torch.ones_like(self.angles), self.angles)).view(1, T, 1, -1)
            z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(z * freqs_cis).flatten(3).type_as(x)
        c, s = self.angles.cos()[:, None], self.angles.sin()[:, None]
        one, two = x[..., ::2], x[..., 1::2]
        return torch.stack([one * c - two * s, one * s + two * c], -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(-1, T, HEADS, D // HEADS) for layer in (self.wq, self.wk, self.wv))
        q, k, v = (y.transpose(1, 2) for y in (self.rope(q), self.rope(k, self.turn), v))
        scores = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(D // HEADS), -1)
        return self.wo((scores @ v).transpose(1, 2).reshape(-1, T, D))


def flat_attention(w: Weights, x: Any) -> Any:
    """As Llama in JAX with complex numbers: the kernels have no axis of heads."""
    q, k, v = ((x @ w[name]).reshape(*x.shape[:-1], HEADS, -1) for name in "qkv")
    q, k = turned_as_complex(q), turned_as_complex(k)
    scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1]), -1)
    return jnp.einsum("bhts,bshk->bthk", scores, v).reshape(x.shape) @ w["o"]


class HalfSplit(nn.Module):
    """As Llama of transformers: the pairs that RoPE turns lie in two halves of a head."""

    def __init__(self, sign: float = 1) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(2 * D, 2 * D, bias=False) for _ in range(4))
        self.sign = sign

    def rope(self, x: Tensor) -> Tensor:
        half = D // 2
        angle = torch.outer(torch.arange(T).double(), 1 / 1e4 ** (torch.arange(half).double() / half)).repeat(1, 2)
        return x * angle.cos() + self.sign * torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).view(-1, T, HEADS, D).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = heads
        scores = torch.softmax(self.rope(q) @ self.rope(k).transpose(2, 3) / math.sqrt(D), -1)
        return self.o_proj((scores @ v).transpose(1, 2).reshape(-1, T, 2 * D))


# ---- FNet: the real part of a Fourier transform instead of attention


def fnet(w: Weights, x: Any) -> Any:
    x = x + jnp.fft.fftn(x, axes=(-2, -1)).real
    return x + jax.nn.relu(x @ w["w1"] + w["b1"]) @ w["w2"]


FNET = {"w1": (D, 2 * D), "b1": (2 * D,), "w2": (2 * D, D)}


class FNet(nn.Module):
    def __init__(self, mixed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.mixed = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False), mixed

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixed(x)
        return x + self.b(torch.relu(self.a(x)))


# ---- a Fourier neural operator of one dimension; its weights are complex, in two leaves, or along a last axis

WEIGHTS: Mapping[str, Callable[[Weights], Any]] = {
    "complex": lambda w: w["c"],
    "two": lambda w: w["re"] + 1j * w["im"],
    "last axis": lambda w: w["c"][..., 0] + 1j * w["c"][..., 1],
}


def fno(kind: str) -> Callable[[Weights, Any], Any]:
    def function(w: Weights, x: Any) -> Any:
        h = x @ w["p"]
        f = jnp.fft.rfft(h, axis=1)
        made = jnp.einsum("bmi,iom->bmo", f[:, :MODES], WEIGHTS[kind](w))
        g = jnp.fft.irfft(jnp.zeros(f.shape, f.dtype).at[:, :MODES].set(made), n=x.shape[1], axis=1)
        return jax.nn.gelu(g + h @ w["s"] + w["b"], approximate=False) @ w["o"]

    return function


def fno_shapes(kind: str) -> dict[str, tuple[int, ...]]:
    shape = (CHANNELS, CHANNELS, MODES)
    of_kind = {"complex": {"c": shape}, "two": {"re": shape, "im": shape}, "last axis": {"c": (*shape, 2)}}
    return {"p": (2, CHANNELS), "s": (CHANNELS, CHANNELS), "b": (CHANNELS,), "o": (CHANNELS, 1), **of_kind[kind]}


class Spectral(nn.Module):
    def __init__(self, kind: str, spectrum: Callable[[Tensor], Tensor], norm: str | None) -> None:
        super().__init__()
        self.kind, self.spectrum, self.norm = kind, spectrum, norm
        drawn = torch.rand(CHANNELS, CHANNELS, MODES, dtype=torch.cfloat)
        if kind == "complex":
            self.weights1 = nn.Parameter(drawn)
        elif kind == "two":
            self.weights_real, self.weights_imag = nn.Parameter(drawn.real.clone()), nn.Parameter(drawn.imag.clone())
        else:
            self.weights = nn.Parameter(torch.view_as_real(drawn))

    @property
    def weight(self) -> Tensor:
        if self.kind == "complex":
            return self.weights1
        if self.kind == "two":
            return torch.complex(self.weights_real, self.weights_imag)
        return torch.view_as_complex(self.weights)

    def forward(self, x: Tensor) -> Tensor:
        f = self.spectrum(torch.fft.rfft(x))
        made = torch.zeros(len(x), CHANNELS, x.shape[-1] // 2 + 1, dtype=torch.cfloat)
        made[:, :, :MODES] = torch.einsum("bix,iox->box", f[:, :, :MODES], self.weight)
        return torch.fft.irfft(made, n=x.size(-1), norm=self.norm)


class FNO(nn.Module):
    def __init__(self, kind: str, spectrum: Callable[[Tensor], Tensor] = lambda f: f, norm: str | None = None) -> None:
        super().__init__()
        self.p, self.q = nn.Linear(2, CHANNELS, bias=False), nn.Linear(CHANNELS, 1, bias=False)
        self.conv, self.w = Spectral(kind, spectrum, norm), nn.Conv1d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.p(x).permute(0, 2, 1)
        return self.q(nn.functional.gelu(self.conv(x) + self.w(x)).permute(0, 2, 1))


# ---- an LRU: a diagonal recurrence of complex numbers, scanned or in a loop


def lru(w: Weights, x: Any) -> Any:
    decay = jnp.exp(-jnp.exp(w["nu"]) + 1j * jnp.exp(w["theta"]))
    given = jnp.einsum("btd,nd->btn", x, (w["b_re"] + 1j * w["b_im"]) * jnp.exp(w["gamma"])[:, None])
    combine = lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1])  # noqa: E731
    _, states = jax.lax.associative_scan(combine, (jnp.broadcast_to(decay, given.shape), given), axis=1)
    return jnp.einsum("btn,dn->btd", states, w["c_re"] + 1j * w["c_im"]).real + w["d"] * x


LRU_SHAPES = {
    **dict.fromkeys(("nu", "theta", "gamma"), (STATES,)),
    **dict.fromkeys(("b_re", "b_im"), (STATES, D)),
    **dict.fromkeys(("c_re", "c_im"), (D, STATES)),
    "d": (D,),
}


class LRU(nn.Module):
    def __init__(self, angle: float = 1, part: Callable[[Tensor], Tensor] = torch.real) -> None:
        super().__init__()
        self.nu_log, self.theta_log, self.gamma_log = (nn.Parameter(torch.rand(STATES)) for _ in range(3))
        self.B = nn.Parameter(torch.randn(STATES, D, dtype=torch.cfloat))
        self.C = nn.Parameter(torch.randn(D, STATES, dtype=torch.cfloat))
        self.D, self.angle, self.part = nn.Parameter(torch.randn(D)), angle, part

    def forward(self, x: Tensor) -> Tensor:
        size, theta = torch.exp(-torch.exp(self.nu_log)), self.angle * torch.exp(self.theta_log)
        decay = torch.complex(size * torch.cos(theta), size * torch.sin(theta))
        b = torch.exp(self.gamma_log).unsqueeze(-1) * self.B
        state, made = torch.zeros(len(x), STATES, dtype=torch.cfloat), []
        for t in range(x.shape[1]):
            state = decay * state + x[:, t].to(b.dtype) @ b.mT
            made.append(self.part(state @ self.C.mT))
        return torch.stack(made, 1) + self.D * x


# ---- S4D: a convolution whose kernel is exponentials, by Fourier transforms


def s4d(w: Weights, x: Any) -> Any:
    a, c = -jnp.exp(w["a_log"]) + 1j * w["a_im"], w["c"][..., 0] + 1j * w["c"][..., 1]
    step, size = a * jnp.exp(w["dt"])[:, None], x.shape[1]
    powers = jnp.exp(step[..., None] * jnp.arange(size))
    kernel = 2 * jnp.einsum("hn,hnl->hl", c * (jnp.exp(step) - 1.0) / a, powers).real
    u = jnp.swapaxes(x, 1, 2)
    y = jnp.fft.irfft(jnp.fft.rfft(u, n=2 * size) * jnp.fft.rfft(kernel, n=2 * size), n=2 * size)[..., :size]
    return jnp.swapaxes(y + u * w["d"][:, None], 1, 2) @ w["o"]


S4D_SHAPES = {"c": (D, STATES, 2), "dt": (D,), "a_log": (D, STATES), "a_im": (D, STATES), "d": (D,), "o": (D, D)}


class S4D(nn.Module):
    def __init__(self, sign: complex = 1j, spectrum: Callable[[Tensor], Tensor] = lambda f: f) -> None:
        super().__init__()
        self.C = nn.Parameter(torch.view_as_real(torch.randn(D, STATES, dtype=torch.cfloat)))
        self.log_dt, self.D = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.log_A_real, self.A_imag = (nn.Parameter(torch.randn(D, STATES)) for _ in range(2))
        self.out, self.sign, self.spectrum = nn.Linear(D, D, bias=False), sign, spectrum

    def forward(self, x: Tensor) -> Tensor:
        u = x.transpose(-1, -2)
        size, c = u.size(-1), torch.view_as_complex(self.C)
        a = -torch.exp(self.log_A_real) + self.sign * self.A_imag
        step = a * torch.exp(self.log_dt).unsqueeze(-1)
        powers = torch.exp(step.unsqueeze(-1) * torch.arange(size))
        kernel = 2 * torch.einsum("hn,hnl->hl", c * (torch.exp(step) - 1.0) / a, powers).real
        k, f = torch.fft.rfft(kernel, n=2 * size), torch.fft.rfft(u, n=2 * size)
        y = torch.fft.irfft(f * self.spectrum(k), n=2 * size)[..., :size]
        return self.out((y + u * self.D.unsqueeze(-1)).transpose(-1, -2))


# ---- S5: a diagonal recurrence whose matrices are discretised, along a last axis in JAX


def s5(w: Weights, x: Any) -> Any:
    eigen, b, c = w["re"] + 1j * w["im"], *(w[k][..., 0] + 1j * w[k][..., 1] for k in "bc")
    decay = jnp.exp(eigen * jnp.exp(w["step"]))
    scaled = (1 / eigen * (decay - 1))[..., None] * b

    def of_one(u: Any) -> Any:
        given = jax.vmap(lambda v: scaled @ v)(u)
        decays = decay * jnp.ones((len(u), STATES))
        _, states = jax.lax.associative_scan(lambda p, q: (q[0] * p[0], q[0] * p[1] + q[1]), (decays, given))
        return jax.vmap(lambda state: 2 * (c @ state).real)(states) + w["d"] * u

    return jax.vmap(of_one)(x)


S5_SHAPES = {
    **dict.fromkeys(("re", "im", "step"), (STATES,)),
    "b": (STATES, D, 2),
    "c": (D, STATES, 2),
    "d": (D,),
}


class S5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.Lambda = nn.Parameter(torch.randn(STATES, dtype=torch.cfloat))
        self.B = nn.Parameter(torch.randn(STATES, D, dtype=torch.cfloat))
        self.C = nn.Parameter(torch.randn(D, STATES, dtype=torch.cfloat))
        self.D, self.log_step = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(STATES))

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.exp(self.Lambda * torch.exp(self.log_step))
        b = (1 / self.Lambda * (decay - 1))[:, None] * self.B
        state, made = torch.zeros(len(x), STATES, dtype=torch.cfloat), []
        for t in range(x.shape[1]):
            state = decay * state + torch.einsum("pd,bd->bp", b, x[:, t].to(b.dtype))
            made.append(2 * torch.einsum("dp,bp->bd", self.C, state).real)
        return torch.stack(made, 1) + self.D * x


# ---- a unitary RNN: turned, reflected and transformed states, which start from zeros


def unitary(w: Weights, x: Any) -> Any:
    v = w["v"] + 1j * w["v_im"]

    def step(h: Any, u: Any) -> Any:
        z = jnp.fft.fft(jnp.exp(1j * w["one"]) * h, norm="ortho")
        z = z - 2 * jnp.outer(z @ jnp.conj(v), v) / jnp.sum(jnp.abs(v) ** 2)
        z = jnp.fft.ifft(z, norm="ortho") * jnp.exp(1j * w["two"]) + u @ (w["re"] + 1j * w["im"])
        size = jnp.abs(z)
        return z * jax.nn.relu(size + w["b"]) / (size + 1e-5), None

    h, _ = jax.lax.scan(step, jnp.zeros((len(x), STATES), jnp.complex64), jnp.swapaxes(x, 0, 1))
    return jnp.concatenate([h.real, h.imag], -1) @ w["o"]


UNITARY = {
    **dict.fromkeys(("one", "two", "v", "v_im", "b"), (STATES,)),
    **dict.fromkeys(("re", "im"), (D, STATES)),
    "o": (2 * STATES, D),
}


class Unitary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d1, self.d2, self.b = (nn.Parameter(torch.rand(STATES)) for _ in range(3))
        self.v = nn.Parameter(torch.randn(STATES, dtype=torch.cfloat))
        self.w = nn.Parameter(torch.randn(D, STATES, dtype=torch.cfloat))
        self.out = nn.Linear(2 * STATES, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, ones = torch.zeros(len(x), STATES, dtype=torch.cfloat), torch.ones_like(self.d1)
        for t in range(x.shape[1]):
            z = torch.fft.fft(torch.polar(ones, self.d1) * h, norm="ortho")
            z = z - 2 * torch.outer(z @ self.v.conj(), self.v) / (self.v.abs() ** 2).sum()
            z = torch.fft.ifft(z, norm="ortho") * torch.polar(ones, self.d2) + x[:, t].to(self.w.dtype) @ self.w
            size = z.abs()
            h = z * torch.relu(size + self.b) / (size + 1e-5)
        return self.out(torch.cat([h.real, h.imag], -1))


# ---- layers of complex numbers


def dense(w: Weights, x: Any) -> Any:
    h = x @ w["k1"] + w["b1"]
    return (jax.nn.relu(h.real) + 1j * jax.nn.relu(h.imag)) @ w["k2"]


DENSE = {"k1": (D, D), "b1": (D,), "k2": (D, D)}


class Dense(nn.Module):
    def __init__(self, given_out: Callable[[Tensor], Tensor] = lambda y: y) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D, dtype=torch.cfloat), nn.Linear(D, D, bias=False, dtype=torch.cfloat)
        self.given_out = given_out

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.given_out(self.b(torch.complex(torch.relu(h.real), torch.relu(h.imag))))


def complex_inputs(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(3, D)) + 1j * rng.normal(size=(3, D))}


# ---- HolE: circular correlation of embeddings


def hole(w: Weights, x: Any) -> Any:
    head, tail, relation = w["e"][x[:, 0]], w["e"][x[:, 1]], w["r"][x[:, 2]]
    return jnp.sum(relation * jnp.fft.ifft(jnp.conj(jnp.fft.fft(head)) * jnp.fft.fft(tail)).real, -1)


class HolE(nn.Module):
    def __init__(self, turn: Callable[[Tensor], Tensor] = torch.conj) -> None:
        super().__init__()
        self.e, self.r, self.turn = nn.Embedding(11, D), nn.Embedding(7, D), turn

    def forward(self, x: Tensor) -> Tensor:
        head, tail, relation = self.e(x[:, 0]), self.e(x[:, 1]), self.r(x[:, 2])
        return (relation * torch.fft.irfft(self.turn(torch.fft.rfft(head)) * torch.fft.rfft(tail), n=D)).sum(-1)
