"""Models with complex values: both parts are compared, and a program may write them as complex or as real numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.core.errors import ConvertError
from convert.inference.derivation import Arithmetic, Derivation, Grade
from convert.inference.infer import infer
from convert.inference.rule_file.complex_tensors import REAL_AND_COMPLEX
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support import complex_models as m
from support.inferred import UNPROVEN, grades, rules, sources


def pairs_of_tokens(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).integers(0, 7, (6, 3))}


def numbers(*shape: int) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {"x": np.random.default_rng(seed).normal(size=shape)}


SEQUENCES, FIELDS = numbers(3, m.T, m.D), numbers(2, m.POINTS, 2)


def derive(
    function: Callable[[Mapping[str, Any], Any], Any],
    module: torch.nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    inputs: Callable[[int], dict[str, Any]] = SEQUENCES,
    complex_leaves: tuple[str, ...] = (),
) -> Derivation:
    return infer(
        lambda leaves, given: {"y": function(leaves, given["x"])},
        module.eval(),
        lambda module, given: {"y": module(given["x"])},
        inputs,
        shapes,
        complex_leaves=complex_leaves,
    )


def check(found: Derivation) -> None:
    assert found.complete, (found.differences, found.proof, grades(found))
    assert grades(found) == {Grade.DERIVED}


slow = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rope", "as_complex"),
    [
        (m.turned, True),
        pytest.param(m.turned_as_complex, False, marks=slow),
        pytest.param(m.turned_as_complex, True, marks=slow),
    ],
)
def test_a_rotation_is_one_in_complex_and_in_real_numbers(rope: Callable[[Any], Any], as_complex: bool) -> None:
    found = derive(m.attention(rope), m.Attention(as_complex=as_complex), m.ATTENTION)
    check(found)
    assert sources(found) == {"wq.weight": "q", "wk.weight": "k", "wv.weight": "v", "wo.weight": "o"}


@slow
def test_a_complex_rotation_of_heads_that_only_the_code_splits() -> None:
    module, shapes = m.HalfSplit().eval(), dict.fromkeys("qkvo", (2 * m.D, 2 * m.D))
    found = derive(m.flat_attention, module, shapes, numbers(3, m.T, 2 * m.D))
    assert found.complete
    turned, rest = rules(found, module)
    assert "rope: {H: interleaved}" in turned and "D(N H)->" in turned
    assert "rope" not in rest


def test_a_fourier_transform_over_two_axes_is_one_after_the_other() -> None:
    module = m.FNet(lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
    check(derive(m.fnet, module, m.FNET))


STORED = [(one, other) for one in m.WEIGHTS for other in m.WEIGHTS]
FIRST = [("two", "complex"), ("complex", "last axis"), ("last axis", "two")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_source", "of_target"), [way if way in FIRST else pytest.param(*way, marks=slow) for way in STORED]
)
def test_spectral_weights_are_stored_in_three_ways(of_source: str, of_target: str) -> None:
    leaves = ("c",) if of_source == "complex" else ()
    found = derive(m.fno(of_source), m.FNO(of_target), m.fno_shapes(of_source), FIELDS, leaves)
    check(found)
    assert found.proof is not None and found.proof.error < 1e-12
    made = {name: of for name, of in sources(found).items() if "conv" in name}
    real, imaginary = ("re", "im") if of_source == "two" else ("c", "c")
    if of_target == "two":
        each = {name: {of} if isinstance(of, str) else set(of) for name, of in made.items()}
        assert each == {"conv.weights_real": {real}, "conv.weights_imag": {imaginary}}
    else:
        (of,) = made.values()
        assert ({of} if isinstance(of, str) else set(of)) == {real, imaginary}


@pytest.mark.parametrize(
    ("function", "module", "shapes"),
    [
        pytest.param(m.lru, m.LRU(), m.LRU_SHAPES, marks=slow),
        pytest.param(m.s4d, m.S4D(), m.S4D_SHAPES, marks=slow),
        pytest.param(m.s5, m.S5(), m.S5_SHAPES, marks=slow),
        pytest.param(m.unitary, m.Unitary(), m.UNITARY, marks=slow),
    ],
    ids=["LRU", "S4D", "S5", "unitary RNN"],
)
def test_recurrences_of_complex_numbers(function: Any, module: torch.nn.Module, shapes: Any) -> None:
    found = derive(function, module, shapes)
    if function is not m.unitary:
        check(found)
        return
    grade = {tensor.name: tensor.grade for tensor in found.tensors}
    assert found.complete and grade.pop("v") is Grade.INTERCHANGEABLE  # i v reflects as v does
    assert set(grade.values()) == {Grade.DERIVED}


@pytest.mark.slow
def test_complex_inputs_weights_and_outputs() -> None:
    check(derive(m.dense, m.Dense(), m.DENSE, m.complex_inputs, tuple(m.DENSE)))


def test_complex_leaves_become_complex_tensors() -> None:
    module = m.Dense().eval()
    found = derive(m.dense, module, m.DENSE, m.complex_inputs, tuple(m.DENSE))
    written = rules(found, module)
    assert [rule.split("\n")[0] for rule in written] == ["- einsum: ...D,DC->...C"] * 2
    assert ["bias: b1" in rule for rule in written] == [True, False]
    assert found.to_dict()["complex_tensors"] == ["a.bias", "a.weight", "b.weight"]


def test_a_complex_tensor_of_two_leaves_has_a_rule() -> None:
    module = m.FNO("complex").eval()
    found = derive(m.fno("two"), module, m.fno_shapes("two"), FIELDS)
    (rule,) = [rule for rule in rules(found, module) if "1j" in rule]
    assert rule == '- from: "re + 1j * im"\n  parameter: conv.weights1'


class Reflected(torch.nn.Module):
    """Layers of which each has a complex matrix and a complex bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(m.D, m.D, dtype=torch.cfloat) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            z = layer(x.to(layer.weight.dtype))
            x = x + torch.tanh(z.real) * torch.sigmoid(z.imag)
        return x


def reflected(w: Mapping[str, Any], x: Any) -> Any:
    for i in range(3):
        z = x @ (w["re"][i] + 1j * w["im"][i]) + (w["bias_re"][i] + 1j * w["bias_im"][i])
        x = x + jnp.tanh(z.real) * jax.nn.sigmoid(z.imag)
    return x


def test_complex_layers_of_stacked_leaves_have_a_rule() -> None:
    module = Reflected().eval()
    shapes = {"re": (3, m.D, m.D), "im": (3, m.D, m.D), "bias_re": (3, m.D), "bias_im": (3, m.D)}
    found = derive(reflected, module, shapes)
    check(found)
    weight, bias = rules(found, module)
    assert weight.startswith('- from: "re + 1j * im"\n  stacked: {i: 0}\n') and "layers.{i}.weight" in weight
    assert bias.startswith('- from: "bias_re + 1j * bias_im"\n  stacked: {i: 0}\n')


class Gains(torch.nn.Module):
    """A real parameter that the code casts to complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.w = torch.nn.Parameter(torch.rand(m.D)), torch.nn.Linear(m.D, m.D, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.fft(x, dim=1) * self.gain.to(torch.cfloat).exp()
        return self.w(torch.fft.ifft(z, dim=1).real)


def test_a_real_parameter_that_becomes_complex() -> None:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        return jnp.fft.ifft(jnp.fft.fft(x, axis=1) * jnp.exp(w["gain"]), axis=1).real @ w["w"]

    found = derive(function, Gains(), {"gain": (m.D,), "w": (m.D, m.D)})
    check(found)
    assert sources(found) == {"gain": "gain", "w.weight": "w"}


@pytest.mark.slow
@pytest.mark.parametrize(("of_source", "of_target"), [("complex", "two"), ("complex", "last axis")])
def test_complex_leaves_of_real_tensors_have_no_words_yet(of_source: str, of_target: str) -> None:
    leaves = ("c",) if of_source == "complex" else ()
    module = m.FNO(of_target).eval()
    found = derive(m.fno(of_source), module, m.fno_shapes(of_source), FIELDS, leaves)
    written = write_rules(found, model_of_module(module, "Model"))
    assert set(written.open.values()) == {REAL_AND_COMPLEX}
    assert compare_rules(written.decided, found, written.open) == []


@pytest.mark.slow
def test_circular_correlation() -> None:
    check(derive(m.hole, m.HolE(), {"e": (11, m.D), "r": (7, m.D)}, pairs_of_tokens))


FAULTS: dict[str, tuple[Any, torch.nn.Module, Any, Any, tuple[str, ...], str]] = {
    "conjugate of a rotation": (
        *(m.attention(m.turned), m.Attention(torch.conj), m.ATTENTION, SEQUENCES, ()),
        "of the sin at .* the target changes the sign",
    ),
    "conjugate of a complex rotation": (
        *(m.attention(m.turned_as_complex), m.Attention(torch.conj), m.ATTENTION, SEQUENCES, ()),
        "of the sin at .* the target changes the sign",
    ),
    "parts of a rotation exchanged": (
        *(m.attention(m.turned), m.Attention(lambda z: torch.complex(z.imag, z.real)), m.ATTENTION, SEQUENCES, ()),
        "put together in another way",
    ),
    "norm of a Fourier transform": (
        *(m.fnet, m.FNet(lambda x: torch.fft.fft2(x, norm="ortho").real), m.FNET, SEQUENCES, ()),
        "the target's values are 0.144338 times",
    ),
    "the other part": (
        *(m.fnet, m.FNet(lambda x: torch.fft.fft2(x).imag), m.FNET, SEQUENCES, ()),
        "the target adds .* the JAX model adds",
    ),
    "one axis of two": (
        *(m.fnet, m.FNet(lambda x: torch.fft.fft(x).real), m.FNET, SEQUENCES, ()),
        "runs fft_r2c",
    ),
    "norm of the way back": (
        *(m.fno("two"), m.FNO("complex", norm="ortho"), m.fno_shapes("two"), FIELDS, ()),
        "the target's values are 3.4641 times",
    ),
    "conjugate of a spectrum": (
        *(m.fno("two"), m.FNO("complex", torch.conj), m.fno_shapes("two"), FIELDS, ()),
        "the target changes the sign",
    ),
    "the imaginary part of the states": (m.lru, m.LRU(part=torch.imag), m.LRU_SHAPES, SEQUENCES, (), "adds, joins"),
    "sign of the angle of a kernel": (m.s4d, m.S4D(sign=-1j), m.S4D_SHAPES, SEQUENCES, (), ""),
    "conjugate of a kernel's spectrum": (m.s4d, m.S4D(spectrum=torch.conj), m.S4D_SHAPES, SEQUENCES, (), ""),
    "conjugate of the output": (
        *(m.dense, m.Dense(torch.conj_physical), m.DENSE, m.complex_inputs, tuple(m.DENSE)),
        "the target changes the sign",
    ),
    "parts of the output exchanged": (
        *(m.dense, m.Dense(lambda y: torch.complex(y.imag, y.real)), m.DENSE, m.complex_inputs, tuple(m.DENSE)),
        "in the order 1, 0",
    ),
    "conjugate missing": (
        *(m.hole, m.HolE(lambda f: f), {"e": (11, m.D), "r": (7, m.D)}, pairs_of_tokens, ()),
        "",
    ),
}
FAST = ("norm of a Fourier transform", "conjugate missing")


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name if name in FAST else pytest.param(name, marks=slow) for name in FAULTS])
def test_another_part_sign_or_norm_is_a_difference(fault: str) -> None:
    *pair, words = FAULTS[fault]
    found = derive(*pair)
    assert found.proof is None and found.differences
    assert grades(found) <= UNPROVEN
    assert re.search(words, found.differences[0].problem), found.differences[0].problem


@slow
def test_a_sign_that_other_weights_make_up_for_is_no_difference() -> None:
    """States that turn the other way round are the conjugate ones, and the output is a real part: B and C in conjugate form give it."""
    found = derive(m.lru, m.LRU(angle=-1), m.LRU_SHAPES, SEQUENCES, ())
    assert found.proof is not None and not found.differences
    parts = {tensor.name: [part.leaf for part in tensor.parts] for tensor in found.tensors}
    assert all(len(parts[name]) == 2 for name in "BC")
    same = {tensor.name: {part.arithmetic for part in tensor.parts} for tensor in found.tensors}
    straight = parts["B"] == ["b_re", "b_im"] and same["B"] == same["C"] == {Arithmetic.SAME}
    assert not straight, "these weights turn the other way round"


def test_real_numbers_in_place_of_complex_ones_are_refused() -> None:
    with pytest.raises(ConvertError) as error:
        derive(m.dense, m.Dense(torch.real), m.DENSE, m.complex_inputs, tuple(m.DENSE))
    (finding,) = error.value.findings
    assert (finding.code, finding.got) == ("reference-values-invalid", "real numbers")
