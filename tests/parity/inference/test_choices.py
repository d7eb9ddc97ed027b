"""Values that only decide a choice, as those in front of a codebook: equal outputs do not show that they are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import WIDTH, derive, floats

D, ROWS = WIDTH, 40
SHAPES = {"enc": (D, D), "scale": (D,), "book": (D, D), "dec": (D, D)}


def normed(x: Any, epsilon: float, scale: Any) -> Any:
    return x * (x**2).mean(-1, keepdims=True).__add__(epsilon) ** -0.5 * scale


class Chooses(torch.nn.Module):
    """The encoder of a VQ-VAE, whose outputs are rows of the codebook: gradients pass it, and no value of the encoder does."""

    def __init__(
        self, choose: Callable[..., Any], epsilon: float = 1e-5, activation: Any = torch.nn.functional.gelu
    ) -> None:
        super().__init__()
        self.enc, self.dec = (torch.nn.Linear(D, D, bias=False) for _ in range(2))
        self.scale, self.book = torch.nn.Parameter(torch.ones(D)), torch.nn.Embedding(D, D)
        self.choose, self.epsilon, self.activation = choose, epsilon, activation

    def forward(self, x: Any) -> Any:
        z = normed(self.activation(self.enc(x)), self.epsilon, self.scale)
        taken = self.book(self.choose(z, self.book.weight))
        return self.dec(z + (taken - z).detach())


def chooses(choose: Callable[..., Any]) -> Callable[..., Any]:
    def function(w: Any, x: Any) -> Any:
        z = normed(jax.nn.gelu(x @ w["enc"], approximate=False), 1e-5, w["scale"])
        taken = w["book"][choose(z, w["book"])]
        return (z + jax.lax.stop_gradient(taken - z)) @ w["dec"]

    return function


def squared(z: Any, book: Any) -> Any:
    return (z**2).sum(1, keepdims=True) + (book**2).sum(1) - 2 * z @ book.T


def of_torch(choose: Callable[..., Any], **how: Any) -> Derivation:
    return derive(
        chooses(lambda z, book: jnp.argmin(squared(z, book), 1)), Chooses(choose, **how), SHAPES, floats(ROWS, D)
    )


CHOICES: dict[str, Callable[..., Any]] = {
    "the square": lambda z, book: squared(z, book).argmin(1),
    "the distance": lambda z, book: squared(z, book).sqrt().argmin(1),
    "the distance by its function": lambda z, book: torch.cdist(z, book).min(1).indices,
    "without what is the same for all": lambda z, book: (2 * z @ book.T - (book**2).sum(1)).argmax(1),
    "the largest of several": lambda z, book: (-squared(z, book)).topk(1).indices[:, 0],
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_the_same_is_chosen_by_other_numbers(choose: Callable[..., Any]) -> None:
    found = of_torch(choose)
    assert found.complete and found.proof is not None, found.differences


FAULTS: list[Any] = [
    ({"epsilon": 1e-3}, "the target adds 0.001, the JAX model adds 1e-05"),
    pytest.param(
        {"activation": lambda x: torch.nn.functional.gelu(x, approximate="tanh")},
        "the target computes gelu_tanh, the JAX model gelu_erf",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_what_is_in_front_of_a_choice_differs(fault: dict[str, Any], words: str) -> None:
    found = of_torch(CHOICES["the square"], **fault)
    (difference,) = found.differences
    assert found.proof is None and not found.complete
    assert f"{words}; the outputs show it only where argmin chooses otherwise" in difference.brief


@pytest.mark.slow
def test_another_choice_of_other_numbers() -> None:
    """Nothing says where the values in front of an `argmax` differ from those of an `argmin`, but that they do."""
    found = of_torch(
        CHOICES["without what is the same for all"],
        activation=lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    )
    (difference,) = found.differences
    assert found.proof is None and not found.complete and not difference.shown
    assert difference.problem == (
        "the outputs show only what it chooses, and the JAX model chooses by other numbers; what is in front of it may differ"
    )


@pytest.mark.parametrize("factor", [1.0, 1.02])
def test_another_distance_where_the_encoder_has_an_output_of_its_own(factor: float) -> None:
    """As every VQ-VAE has in its loss; few choices change, and none of these."""

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.book = torch.nn.Linear(D, D, bias=False), torch.nn.Embedding(D, D)

        def forward(self, x: Any) -> Any:
            z, book = self.enc(x), self.book.weight
            nearest = (factor * (book**2).sum(1) - 2 * z @ book.T).argmin(1)
            return torch.cat([z, self.book(nearest)], -1)

    def function(w: Any, x: Any) -> Any:
        z = x @ w["enc"]
        return jnp.concatenate([z, w["book"][jnp.argmin(squared(z, w["book"]), 1)]], -1)

    found = derive(function, Both(), {"enc": (D, D), "book": (D, D)}, floats(8, D))
    assert found.complete is (factor == 1.0)
    assert not found.complete or found.proof is not None


def test_a_rounded_code() -> None:
    """As finite scalar quantisation does: no value in front of the rounding reaches the outputs."""

    class Rounds(torch.nn.Module):
        def __init__(self, epsilon: float) -> None:
            super().__init__()
            self.enc, self.dec = (torch.nn.Linear(D, D, bias=False) for _ in range(2))
            self.epsilon = epsilon

        def forward(self, x: Any) -> Any:
            return self.dec(torch.round(3 * normed(self.enc(x), self.epsilon, 1)))

    def function(w: Any, x: Any) -> Any:
        return jnp.round(3 * normed(x @ w["enc"], 1e-5, 1)) @ w["dec"]

    shapes = {"enc": (D, D), "dec": (D, D)}
    assert derive(function, Rounds(1e-5), shapes, floats(ROWS, D)).complete
    found = derive(function, Rounds(1e-7), shapes, floats(ROWS, D))
    assert not found.complete
    assert "the target adds 1e-07, the JAX model adds 1e-05" in found.differences[0].brief


def test_a_choice_that_hides_nothing() -> None:
    """A gate that is open or shut by its value, which the outputs have as well."""

    class Gates(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Linear(D, D) for _ in range(2))

        def forward(self, x: Any) -> Any:
            y = self.a(x)
            return self.b(torch.where(y > 0.25, y, 0.1 * y))

    def function(w: Any, x: Any) -> Any:
        y = x @ w["a"] + w["ab"]
        return (y * jnp.where(4 * y > 1, 1.0, 0.1)) @ w["b"] + w["bb"]

    found = derive(function, Gates(), {"a": (D, D), "ab": (D,), "b": (D, D), "bb": (D,)}, floats(ROWS, D))
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}


@pytest.mark.parametrize("limit", [0.25, 0.2501])
def test_another_limit(limit: float) -> None:
    """The number that is compared is the same."""

    class Opens(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Linear(D, D, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            return torch.where(self.a(x) > limit, self.b(x), -1)

    def function(w: Any, x: Any) -> Any:
        return jnp.where(x @ w["a"] > 0.25, x @ w["b"], -1)

    found = derive(function, Opens(), {"a": (D, D), "b": (D, D)}, floats(ROWS, D))
    assert (found.complete and found.proof is not None) is (limit == 0.25)


def test_inputs_that_only_choose() -> None:
    """Tokens are no values that parameters are in."""
    net = torch.nn.Sequential(torch.nn.Embedding(7, D), torch.nn.Linear(D, D, bias=False))
    tokens = lambda seed: {"x": np.random.default_rng(seed).integers(0, 7, (3, 9))}  # noqa: E731
    assert derive(lambda w, x: w["t"][x] @ w["k"], net, {"t": (7, D), "k": (D, D)}, tokens).complete


LIMITS = np.linspace(-2, 2, D - 1)


@pytest.mark.slow
@pytest.mark.parametrize("off", [0.0, 1e-4])
@pytest.mark.parametrize("kind", ["constant", "buffer", "parameter"])
def test_bins_of_an_input(kind: str, off: float) -> None:
    """As those of the pitch in FastSpeech 2. An input that is close to a limit is drawn by chance alone."""

    class Bins(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            limits = torch.as_tensor(LIMITS + off)
            self.emb, self.head = torch.nn.Embedding(D, D), torch.nn.Linear(D, D, bias=False)
            if kind == "parameter":
                self.limits: Any = torch.nn.Parameter(limits, requires_grad=False)
            elif kind == "buffer":
                self.register_buffer("limits", limits)
            else:
                self.limits = limits

        def forward(self, x: Any) -> Any:
            return self.head(torch.tanh(self.emb(torch.bucketize(x, self.limits))))

    def function(w: Any, x: Any) -> Any:
        return jnp.tanh(w["emb"][jnp.searchsorted(LIMITS, x)]) @ w["head"]

    found = derive(function, Bins(), {"emb": (D, D), "head": (D, D)}, floats(2, ROWS))
    assert (found.complete and found.proof is not None) is (off == 0)
    assert [difference.shown for difference in found.differences] == [False] * (off != 0)
    assert not any("select_n" in note for note in found.notes)  # what `searchsorted` does for the sign of a zero


@pytest.mark.parametrize(("limit", "equal"), [(lambda x: 1 - x < 0.75, True), (lambda x: x > 0.2501, False)])
def test_noise_that_only_chooses(limit: Callable[..., Any], equal: bool) -> None:
    """As the numbers by which a sampler accepts or refuses."""

    class Accepts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Linear(D, D, bias=False) for _ in range(2))

        def forward(self, x: Any, noise: Any) -> Any:
            return torch.where(limit(noise), self.a(x), self.b(x))

    found = infer(
        lambda w, given: {"y": jnp.where(given["noise"] > 0.25, given["x"] @ w["a"], given["x"] @ w["b"])},
        Accepts().eval(),
        lambda module, given: {"y": module(given["x"], given["noise"])},
        lambda seed: {**floats(ROWS, D)(seed), "noise": np.random.default_rng(seed).uniform(size=(ROWS, 1))},
        {"a": (D, D), "b": (D, D)},
    )
    assert found.complete is equal


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 2])
def test_a_distribution_whose_numbers_are_buffers(factor: float) -> None:
    """PyTorch asks whether they are numbers, which is a choice by a buffer of zeros."""

    class Flow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(D, D)
            self.register_buffer("loc", torch.zeros(D))
            self.register_buffer("scale", torch.ones(D))

        def forward(self, x: Any) -> Any:
            return factor * torch.distributions.Normal(self.loc, self.scale).log_prob(self.net(x)).sum(-1)

    def function(w: Any, x: Any) -> Any:
        return jax.scipy.stats.norm.logpdf(x @ w["w"] + w["b"]).sum(-1)

    found = derive(function, Flow(), {"w": (D, D), "b": (D,)}, floats(5, D))
    assert found.complete == (factor == 1)


def _sparsemax(z: Any, off: float = 0) -> Any:
    z = z - z.max(-1, keepdim=True)[0]
    ordered, _ = z.sort(-1, descending=True)
    total = ordered.cumsum(-1) - 1 - off
    count = (torch.arange(1, D + 1) * ordered > total).sum(-1, keepdim=True)
    return (z - total.gather(-1, count - 1) / count).clamp(min=0)


class Sparse(torch.nn.Module):
    """Attention to columns by a sparsemax, whose results are zeros and ones."""

    def __init__(self, off: float = 0, activation: Any = torch.nn.functional.gelu) -> None:
        super().__init__()
        self.enc, self.dec = (torch.nn.Linear(D, D, bias=False) for _ in range(2))
        self.off, self.activation = off, activation

    def forward(self, x: Any) -> Any:
        return self.dec(x * _sparsemax(1000 * self.activation(self.enc(x)), self.off))


def _sparse(w: Any, x: Any) -> Any:
    z = 1000 * jax.nn.gelu(x @ w["enc"], approximate=False)
    ordered = jnp.sort(z, -1)[..., ::-1]
    k = jnp.arange(1, D + 1)
    inside = 1 + k * ordered > jnp.cumsum(ordered, -1)
    total = jnp.where(inside, ordered, 0).sum(-1, keepdims=True) - 1
    return (x * jax.nn.relu(z - total / inside.sum(-1, keepdims=True))) @ w["dec"]


@pytest.mark.slow
def test_numbers_in_order_of_which_one_program_takes_the_places_too() -> None:
    """torch.sort gives both, jnp.sort the numbers alone; one subtracts the largest before, and compares other numbers by as much."""
    found = derive(_sparse, Sparse(), {"enc": (D, D), "dec": (D, D)}, floats(ROWS, D))
    assert found.complete and found.proof is not None, found.differences
    assert not derive(_sparse, Sparse(off=0.5), {"enc": (D, D), "dec": (D, D)}, floats(ROWS, D)).complete


def test_another_function_in_front_of_such_an_order() -> None:
    tanh = Sparse(activation=lambda x: torch.nn.functional.gelu(x, approximate="tanh"))
    found = derive(_sparse, tanh, {"enc": (D, D), "dec": (D, D)}, floats(ROWS, D))
    assert found.proof is None and "gelu" in found.differences[0].problem


class Towers(torch.nn.Module):
    """Layers beside one another, which the JAX model has in a stack, with a PReLU of each: the sign of what a row of the stack has decides."""

    def __init__(self, slope: float = 0.0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(3))
        self.slopes = torch.nn.ParameterList(torch.zeros(D) for _ in range(3))
        self.heads, self.slope = torch.nn.ModuleList(torch.nn.Linear(D, 2) for _ in range(3)), slope

    def forward(self, x: Any) -> Any:
        found = []
        for layer, slope, head in zip(self.layers, self.slopes, self.heads, strict=True):
            found.append(head(torch.nn.functional.prelu(layer(x), slope + self.slope)))
        return torch.cat(found, 1)


@pytest.mark.slow
@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_a_prelu_of_each_layer_of_a_stack(slope: float) -> None:
    def function(w: Any, x: Any) -> Any:
        y = jnp.einsum("bd,tde->bte", x, w["w"]) + w["b"]
        y = jnp.where(y >= 0, y, w["s"] * y)
        return (jnp.einsum("btd,tde->bte", y, w["v"]) + w["c"]).reshape(len(x), -1)

    shapes = {"w": (3, D, D), "b": (3, D), "s": (3, D), "v": (3, D, 2), "c": (3, 2)}
    found = derive(function, Towers(slope), shapes, floats(ROWS, D))
    assert found.complete == (not slope) and bool(found.differences) == bool(slope), found.differences
