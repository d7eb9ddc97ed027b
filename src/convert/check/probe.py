"""One layer at the layers level: the declared JAX operation with the source's weights, torch's layer with the written ones."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.check.compare import Tolerance, difference, epsilon
from convert.check.paired import paired
from convert.check.report import Measure
from convert.einsum import Projection
from convert.kinds import Convolution, Embedding, LayerNorm, Linear, Rule, TargetLayer
from convert.kinds.conv import DimensionNumbers
from convert.kinds.conventions import target_pairs
from convert.kinds.norm import Norm
from convert.ops import Take, is_float
from convert.plan import Plan
from convert.steps import Part, Step

if TYPE_CHECKING:
    import jax
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 18  # values of a weight that are widened at a time
BATCH = 3  # of each batch or time axis of an input: small, and no size of a layer
ELLIPSIS = "z"  # one axis stands for it; equations use letters of their own
ENTRIES = 17  # looked up in an embedding table


class Probe:
    """One tensor's layer, on both sides."""

    def __init__(self, rule: Rule, plan: Plan, step: Step, part: Part, device: str, rng: np.random.Generator) -> None:
        self.rule, self.plan, self.step, self.part, self.device, self.rng = rule, plan, step, part, device, rng

    @property
    def _layer(self) -> TargetLayer:
        layer = self.rule.layer(self.plan.target)
        assert layer is not None
        return layer

    def measure(self, leaf: Array, written: Array) -> Measure | None:
        """Both sides in float64 and in the tensor's own dtype; None for tensors that are no floats."""
        if not is_float(leaf.dtype.name) or not is_float(written.dtype.name):
            return None
        own = leaf
        for op in self.part.ops[: len(self.rule.stacked)]:
            own = op.apply(own)
        rows = self.part.share(written)
        precision = self.step.spec.dtype if self.step.spec.dtype in ("float32", "bfloat16", "float16") else "float32"
        run, reduction = self._operation(own, rows, precision)
        exact = difference(*run("float64"), precision="float64")
        drift = difference(*run(precision), precision=precision)
        return Measure(
            self.step.name if self.part.rows is None else f"{self.step.name}[{self.part.rows[0]}:{self.part.rows[1]}]",
            drift,
            bound(precision, reduction),
            exact,
            self._castbound(leaf, reduction),
            self.rule.at.line_only,
        )

    def _freed(self, y: Array, axes: str) -> Array:
        """A value of the source's without the factor that its weight carries, its features in the target's order."""
        if self.rule.carries is not None:
            y = y / self.rule.carries.value(self.plan.sizes)
        if self.rule.rope is not None and self.rule.rope.axis in axes:
            y = paired(y, axes.index(self.rule.rope.axis), self.rule.rope.pairs, target_pairs(self._layer))
        return y

    def _castbound(self, leaf: Array, reduction: int) -> Tolerance:
        """In float64 only what the written dtype lost may differ."""
        if not self.step.loses and not self.step.arithmetic:
            return bound("float64", reduction)
        value = 2 * epsilon(self.step.spec.dtype)
        said = self.step.loses or f"rounded once to {self.step.spec.dtype} after '{self.step.arithmetic}'"
        return Tolerance(value, f"2 x eps({self.step.spec.dtype}): the weights were {said}")

    def _operation(self, own: Array, rows: Array, precision: str) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        kind = self.rule.kind
        axes = getattr(kind, "axes", None) or ""
        if "." in axes:  # axes of size 1 that the target does not have
            own = own.reshape([size for letter, size in zip(axes, own.shape, strict=True) if letter != "."])
        if isinstance(kind, Linear):
            return (
                self._linear(kind, own, rows, precision) if self.step.role == "weight" else self._bias(kind, own, rows)
            )
        if isinstance(kind, Convolution) and self.step.role == "weight":
            return self._convolution(kind, own, rows)
        if isinstance(kind, Norm):
            return self._norm(kind, own, rows, precision)
        if isinstance(kind, Embedding):
            return self._embedding(own, rows)
        return (lambda dtype: (rows.astype(np.float64), own.astype(np.float64))), 1

    def _linear(
        self, kind: Linear, own: Array, rows: Array, precision: str
    ) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        equation = kind.equations[self.plan.choices[self.rule.choice] if self.rule.choice else ""]
        operand, rest = equation.equation.split(",")
        result = rest.split("->")[1]
        if self._layer.computes is not None:
            return self._einsums(equation, self._layer.computes, own, rows, precision)
        sizes = dict(zip(equation.weight, own.shape, strict=True))
        letters = operand.replace("...", "")
        x = self.rng.standard_normal([BATCH] * ("..." in operand) + [sizes.get(letter, BATCH) for letter in letters])
        dots = "z" if "..." in operand else ""  # one axis stands for the ellipsis; equations use letters of their own
        named = operand.replace("...", dots)
        wanted = result.replace("...", dots)
        batch = [letter for letter in wanted if letter not in equation.outputs]
        member = next((op.index for op in self.part.ops[len(self.rule.stacked) :] if isinstance(op, Take)), None)
        split = equation.outputs[0] if len(self.part.groups[0]) < len(equation.outputs) else ""
        order, outputs = (wanted.replace(split, ""), equation.outputs[1:]) if split else (wanted, equation.outputs)

        results = _jnp_einsum(equation.equation, x, own, precision)

        def run(dtype: str) -> tuple[Array, Array]:
            flat = np.einsum(f"{named}->{''.join(batch)}{equation.inputs}", x).reshape(*[BATCH] * len(batch), -1)
            got = _torch_linear(flat, rows, dtype, self.device)  # while JAX still computes: it was only asked to
            y = self._freed(np.asarray(results[dtype]), wanted)
            if split and member is not None:
                y = np.take(y, member, wanted.index(split))
            return got, np.einsum(f"{order}->{''.join(batch)}{outputs}", y).reshape(*[BATCH] * len(batch), -1)

        return run, rows.shape[-1]

    def _bias(self, kind: Linear, own: Array, rows: Array) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        """A bias is added to the result; NumPy's broadcasting of the stored array says which value goes where."""
        equation = kind.equations[self.plan.choices[self.rule.choice] if self.rule.choice else ""]
        letters = equation.bias_axes(own.shape)
        if self._layer.computes is not None:
            return (lambda dtype: (rows.astype(np.float64), self._freed(own.astype(np.float64), letters))), 1
        sizes = dict(zip(letters, own.shape, strict=True))
        member = next((op.index for op in self.part.ops[len(self.rule.stacked) :] if isinstance(op, Take)), None)

        def run(dtype: str) -> tuple[Array, Array]:
            y = own.reshape([sizes[letter] for letter in letters if letter in equation.outputs])
            y = self._freed(y.astype(np.float64), "".join(x for x in letters if x in equation.outputs))
            split = len(self.part.groups[0]) < len(equation.outputs)
            kept = [letter for letter in letters if letter in equation.outputs]
            if split and member is not None:
                y = np.take(y, member, kept.index(equation.outputs[0]))
            return rows.astype(np.float64), y.reshape(-1).astype(np.float64)

        return run, 1

    def _einsums(
        self, equation: Projection, other: Projection, own: Array, rows: Array, precision: str
    ) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        """An einsum on both sides, each with its own equation."""
        sizes = dict(zip(equation.weight, own.shape, strict=True))
        operand, _, result = re.split(",|->", equation.equation.replace("...", ELLIPSIS))
        x = self.rng.standard_normal([sizes.get(letter, BATCH) for letter in operand])

        results = _jnp_einsum(f"{operand},{equation.weight}->{result}", x, own, precision)

        def run(dtype: str) -> tuple[Array, Array]:
            got = _torch_einsum(f"{operand},{other.weight}->{result}", x, rows, dtype, self.device)
            return got, self._freed(np.asarray(results[dtype]), result)

        return run, int(np.prod([sizes[letter] for letter in equation.inputs]))

    def _convolution(
        self, kind: Convolution, own: Array, rows: Array
    ) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        """Without padding and strides, which are no weights: the model level sees those."""
        numbers, theirs = kind.numbers, self._layer.computes
        sizes = dict(zip(kind.axes, own.shape, strict=True))
        groups = kind.group_count(sizes)
        channels = groups * sizes.get(kind.letter("I"), 1)
        spatial = {x: sizes[kind.letter(x)] + 2 + k for k, x in enumerate(numbers.spatial)}
        x = self.rng.standard_normal(
            [BATCH if a == "N" else channels if a == "C" else spatial[a] for a in numbers.input]
        )
        order = "NC" + numbers.spatial  # torch's
        flat = np.einsum(f"{numbers.input}->{order}", x)
        kernel = rows
        if theirs is not None:  # from the target's own order of axes to torch's
            wanted = "OI" + theirs.spatial
            stored = theirs.kernel + ("I" if theirs.depthwise else "")
            kernel = np.einsum(f"{stored}->{wanted}", rows[..., None] if theirs.depthwise else rows)

        def run(dtype: str) -> tuple[Array, Array]:
            want = _jax_convolution(numbers, groups, x, own, dtype)
            got = _torch_convolution(flat, kernel, groups, dtype, self.device)
            return got, np.einsum(f"{numbers.result}->{order}", want)

        return run, int(np.prod([sizes[kind.letter(axis)] for axis in numbers.kernel if axis != "O"]))

    def _norm(
        self, kind: Norm, own: Array, rows: Array, precision: str
    ) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        layer = self._layer
        epsilon_ = self.plan.facts[kind.epsilon] if isinstance(kind.epsilon, str) else kind.epsilon
        if self.step.role == "bias":
            return (lambda dtype: (rows.astype(np.float64), own.astype(np.float64))), 1
        x = self.rng.standard_normal((BATCH, *own.shape)) * 3 + 1
        centred = isinstance(kind, LayerNorm)

        wanted = _jax_norm(x, own, precision, centred, float(epsilon_), kind.multiplies_by)

        def run(dtype: str) -> tuple[Array, Array]:
            axes = "." * (x.ndim - own.ndim) + (kind.axes or "." * own.ndim)
            given = self._freed(x, axes)  # the layer before gives the target its features in the target's order
            got = _torch_norm(given, rows, dtype, self.device, centred, float(epsilon_), layer.multiplies_by)
            return got, self._freed(np.asarray(wanted[dtype]), axes)

        return run, own.size

    def _embedding(self, own: Array, rows: Array) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        tokens = self.rng.integers(0, rows.shape[0], ENTRIES)  # rows that the target has; others are padding

        def run(dtype: str) -> tuple[Array, Array]:
            import jax.numpy as jnp
            import torch

            want = jnp.take(jnp.asarray(own), jnp.asarray(tokens), axis=0)
            table = _tensor(rows, "float64", self.device)
            got = torch.nn.functional.embedding(torch.as_tensor(tokens, device=self.device), table)
            return got.cpu().numpy(), self._freed(np.asarray(want).astype(np.float64), "..")

        return run, 1


def bound(precision: str, reduction: int) -> Tolerance:
    value = 8 * float(np.sqrt(max(reduction, 1))) * epsilon(precision)
    return Tolerance(value, f"8 x sqrt({reduction} summands) x eps({precision}): two orders of the same sum")


def _jnp_einsum(equation: str, x: Array, weight: Array, precision: str) -> Mapping[str, jax.Array]:
    """`jnp.einsum` in float64 and in `precision`, as JAX gives them: perhaps before they are computed."""
    exact, drifted = _compiled(_renamed(equation), precision)(x, weight)
    return {precision: drifted, "float64": exact}


def _renamed(equation: str) -> str:
    """The same equation, its letters a, b, ... in the order in which they occur: layers of one shape compile once."""
    letters = dict.fromkeys(filter(str.isalpha, equation))
    return equation.translate(str.maketrans("".join(letters), ascii_letters[: len(letters)]))


@lru_cache(maxsize=256)
def _compiled(equation: str, precision: str) -> Callable[[Array, Array], tuple[jax.Array, jax.Array]]:
    """Both precisions, compiled once with their casts: a layer's shapes come back in every layer."""
    import jax
    import jax.numpy as jnp

    def run(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(
            jnp.einsum(equation, x.astype(dtype), weight.astype(dtype)).astype("float64")
            for dtype in ("float64", precision)
        )

    return jax.jit(run)


def _tensor(x: Array, dtype: str, device: str) -> torch.Tensor:
    """For reading alone: shares the array's memory where it can."""
    import torch

    known = x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)  # which holds the narrow ones exactly
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor = torch.from_numpy(np.ascontiguousarray(known))
    return tensor.to(device=device, dtype=getattr(torch, dtype))


def _torch_linear(x: Array, weight: Array, dtype: str, device: str) -> Array:
    """`torch.nn.functional.linear`, some output features at a time: a block of the weight fits into a cache."""
    import torch

    given = _tensor(x, dtype, device)
    rows = max(1, BLOCK // weight.shape[1])
    blocks = [weight[k : k + rows] for k in range(0, weight.shape[0], rows)]
    y = torch.cat([torch.nn.functional.linear(given, _tensor(block, dtype, device)) for block in blocks], dim=-1)
    return np.asarray(y.double().cpu().numpy())


def _torch_einsum(equation: str, x: Array, weight: Array, dtype: str, device: str) -> Array:
    import torch

    y = torch.einsum(equation, _tensor(x, dtype, device), _tensor(weight, dtype, device))
    return np.asarray(y.double().cpu().numpy())


def _jax_convolution(numbers: DimensionNumbers, groups: int, x: Array, kernel: Array, dtype: str) -> Array:
    return np.asarray(_compiled_convolution(numbers, groups, dtype)(x, kernel))


@lru_cache(maxsize=256)
def _compiled_convolution(numbers: DimensionNumbers, groups: int, dtype: str) -> Callable[[Array, Array], jax.Array]:
    import jax

    spec = numbers.kernel + "I" * numbers.depthwise

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        kernel = kernel[..., None] if numbers.depthwise else kernel
        y = jax.lax.conv_general_dilated(
            x.astype(dtype),
            kernel.astype(dtype),
            [1] * len(numbers.spatial),
            "VALID",
            dimension_numbers=(numbers.input, spec, numbers.result),
            feature_group_count=groups,
        )
        return y.astype("float64")

    return jax.jit(run)


def _torch_convolution(x: Array, kernel: Array, groups: int, dtype: str, device: str) -> Array:
    import torch

    functions = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)
    y = functions[x.ndim - 3](_tensor(x, dtype, device), _tensor(kernel, dtype, device), groups=groups)
    return np.asarray(y.double().cpu().numpy())


def _jax_norm(
    x: Array, scale: Array, precision: str, centred: bool, eps: float, factor: str
) -> Mapping[str, jax.Array]:
    """A norm in float64 and in `precision`."""
    exact, drifted = _compiled_norm(precision, centred, eps, factor)(x, scale)
    return {precision: drifted, "float64": exact}


@lru_cache(maxsize=256)
def _compiled_norm(
    precision: str, centred: bool, eps: float, factor: str
) -> Callable[[Array, Array], tuple[jax.Array, jax.Array]]:
    """flax's and praxis's formula; statistics in float32 or wider, as both do."""
    import jax
    import jax.numpy as jnp

    def one(x: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
        wide = "float64" if dtype == "float64" else "float32"
        y = x.astype(dtype).astype(wide)
        if centred:
            y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + eps)
        s = scale.astype(wide)
        y = y * (1 + s if factor == "1+scale" else s)
        return y.astype(dtype).astype("float64")

    return jax.jit(lambda x, scale: tuple(one(x, scale, dtype) for dtype in ("float64", precision)))


def _torch_norm(x: Array, weight: Array, dtype: str, device: str, centred: bool, eps: float, factor: str) -> Array:
    import torch

    wide = "float64" if dtype == "float64" else "float32"
    tensor, w = _tensor(x, dtype, device).to(getattr(torch, wide)), _tensor(weight, wide, device)
    w = 1 + w if factor == "1+weight" else w
    shape = list(w.shape)
    function = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
    y = function(tensor, shape, w, eps=eps)
    return np.asarray(y.to(getattr(torch, dtype)).double().cpu().numpy())
