"""One layer at the layers level: the declared JAX operation with the source's weights, torch's layer with the written ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.einsum import Projection
from convert.core.ops import Take, is_float
from convert.core.weight_norm_ops import operand_leaves
from convert.layers import (
    BatchNorm,
    Convolution,
    ConvTranspose,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    Rule,
    TargetLayer,
)
from convert.layers.base import Part, Step
from convert.layers.norm.group_batch import COUNTER
from convert.layers.norm.layer_rms import Norm
from convert.layers.weight_normalization import kept
from convert.layers.weight_transforms import target_order, target_pairs
from convert.planning.plan import Plan
from convert.verify.layers.conv import probe_convolution
from convert.verify.layers.norm import POSITIONS, batch_norm_sides, group_norm_sides, jax_norm, torch_norm
from convert.verify.layers.rope_pairs import paired
from convert.verify.layers.weight_norm import effective, normalized_bias
from convert.verify.numerics.compare import Tolerance, difference, epsilon
from convert.verify.numerics.torch_arrays import SHARED, tensor
from convert.verify.report.report import Measure

if TYPE_CHECKING:
    import jax

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 18  # values of a weight that are widened at a time
WIDENED = 1 << 22  # the same on JAX's side, where each call has its price
BATCH = 3  # of each batch or time axis of an input: small, and no size of a layer
ELLIPSIS = "z"  # one axis stands for it; equations use letters of their own
ENTRIES = 17  # looked up in an embedding table


class Probe:
    """One tensor's layer, on both sides."""

    def __init__(
        self,
        rule: Rule,
        plan: Plan,
        step: Step,
        part: Part,
        device: str,
        rng: np.random.Generator,
        written: Callable[[str], Array],
    ) -> None:
        self.rule, self.plan, self.step, self.part, self.device, self.rng = rule, plan, step, part, device, rng
        self.written = written  # reads other tensors of the same layer

    @property
    def _layer(self) -> TargetLayer:
        layer = self.rule.layer(self.plan.target)
        assert layer is not None
        return layer

    def measure(self, own: Array, written: Array) -> Measure | None:
        """Both sides in float64 and in the tensor's own dtype; None for tensors that are no floats.

        Args:
            own: the leaf's weight of this layer, as stored, without stacked axes. written: the file's tensor; of both of an
                embedding's table it may be the same rows.
        """
        if not is_float(own.dtype.name) or not is_float(written.dtype.name):
            return None
        if self.step.role == "weight" and (
            self.rule.normalized or getattr(self.rule.kind, "weight_standardization", None)
        ):
            variant = self.plan.choices[self.rule.choice] if self.rule.choice else None
            own = effective(self.rule, own, self._beside(), kept(self.rule, self._layer), variant)
        elif self.rule.normalized and self.step.role == "bias" and (sidecar := self._beside()):
            own = normalized_bias(self.rule, own, sidecar[0])
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
            self._castbound(reduction),
            self.rule.at.line_only,
        )

    def _unstacked(self, leaf: Array, part: Part) -> Array:
        for op in part.ops[: len(self.rule.stacked)]:
            leaf = op.apply(leaf)
        return leaf

    def _beside(self) -> list[Array]:
        """The leaves beside the weight's, whose element of a stack is the weight's."""
        return [self._unstacked(self.plan.source.read(name), self.part) for name in operand_leaves(self.part.ops)]

    def _in_order(self, y: Array, axes: str) -> Array:
        """A value of the source's with a flattened map in the target's order."""
        flat = self.rule.flattened
        if flat is None or flat.axis not in axes:
            return y
        at = axes.index(flat.axis)
        apart = y.reshape(*y.shape[:at], *(self.plan.sizes[x] for x in flat.order), *y.shape[at + 1 :])
        moved = [at + flat.order.index(x) for x in target_order(self.rule, self._layer)]
        rest = range(at + len(flat.order), apart.ndim)
        return apart.transpose([*range(at), *moved, *rest]).reshape(y.shape)

    def _freed(self, y: Array, axes: str) -> Array:
        """A value of the source's without the factor that its weight carries, its features in the target's order."""
        if self.rule.prescaled_by is not None:
            y = y / self.rule.prescaled_by.value(self.plan.sizes)
        if self.rule.rope is not None and self.rule.rope.axis in axes:
            y = paired(y, axes.index(self.rule.rope.axis), self.rule.rope.pairs, target_pairs(self._layer))
        return self._in_order(y, axes)

    def _castbound(self, reduction: int) -> Tolerance:
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
        if isinstance(kind, Linear) and self.step.role == "weight":
            return self._linear(kind, own, rows, precision)
        if isinstance(kind, Linear) and self.step.role == "bias":
            return self._bias(kind, own, rows)
        if isinstance(kind, (Convolution, ConvTranspose)) and self.step.role == "weight":
            return self._convolution(kind, own, rows)
        if isinstance(kind, Norm) and self.step.role != self.rule.lead:
            return (lambda dtype: (rows.astype(np.float64).reshape(own.shape), own.astype(np.float64))), 1
        if isinstance(kind, GroupNorm):
            return self._group_norm(kind, own, rows)
        if isinstance(kind, BatchNorm):
            return self._batch_norm(kind, own, rows)
        if isinstance(kind, Norm):
            return self._norm(kind, own, rows, precision)
        if self.step.tied and self.step.word == "linear":
            return self._tied_head(own, rows, precision)
        if isinstance(kind, Embedding) and self.step.word == "embedding":
            return self._embedding(own, rows)
        if self.step.tied:
            own = own[: rows.shape[0]]
        return (lambda dtype: (rows.astype(np.float64), own.astype(np.float64).reshape(rows.shape))), 1

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

        results = self._merged(equation, x, precision) or _jnp_einsum(equation.equation, precision, x, own)

        def run(dtype: str) -> tuple[Array, Array]:
            given = self._in_order(x, named)
            flat = np.einsum(f"{named}->{''.join(batch)}{equation.inputs}", given).reshape(*[BATCH] * len(batch), -1)
            got = _torch_linear(flat, rows, dtype, self.device)
            y = self._freed(results[dtype], wanted)
            if split and member is not None:
                y = np.take(y, member, wanted.index(split))
            return got, np.einsum(f"{order}->{''.join(batch)}{outputs}", y).reshape(*[BATCH] * len(batch), -1)

        return run, rows.shape[-1]

    def _merged(self, equation: Projection, x: Array, precision: str) -> Mapping[str, Array] | None:
        """What the source computes by leaves that the plan merges, one by one as they lie on disk; None for other leaves."""
        merge = self.plan.merges.get(self.part.leaf)
        if merge is None:
            return None

        def stored(name: str) -> Array:
            leaf = self.plan.checkpoint.read(name)
            for op in self.part.ops[: len(self.rule.stacked)]:
                leaf = op.apply(leaf)
            return leaf

        a, b = stored(merge.first), stored(merge.second)
        behind = _jnp_einsum(merge.product.equation, precision, x, a, b)
        total = {dtype: merge.scale * value for dtype, value in behind.items()}
        if merge.base is not None:
            before = _jnp_einsum(equation.equation, precision, x, stored(merge.base))
            total = {dtype: value + before[dtype] for dtype, value in total.items()}
        return total

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

        results = _jnp_einsum(f"{operand},{equation.weight}->{result}", precision, x, own)

        def run(dtype: str) -> tuple[Array, Array]:
            got = _torch_einsum(f"{operand},{other.weight}->{result}", x, rows, dtype, self.device)
            return got, self._freed(results[dtype], result)

        return run, int(np.prod([sizes[letter] for letter in equation.inputs]))

    def _convolution(
        self, kind: Convolution | ConvTranspose, own: Array, rows: Array
    ) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        return probe_convolution(kind, own, rows, self._layer.computes, BATCH, self.device, self.rng)

    def _norm(
        self, kind: Norm, own: Array, rows: Array, precision: str
    ) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        """The run of the scale, or where the source has none, of the bias; with what is written of nothing beside it."""
        layer = self._layer
        epsilon_ = self._epsilon(kind)
        x = self.rng.standard_normal((BATCH, *own.shape)) * 3 + 1
        centred = isinstance(kind, LayerNorm)
        weight, bias = self._affine(kind, rows)

        wanted = jax_norm(x, own, precision, centred, epsilon_, kind.multiplies_by)

        def run(dtype: str) -> tuple[Array, Array]:
            axes = "." * (x.ndim - own.ndim) + (kind.axes or "." * own.ndim)
            given = self._freed(x, axes)  # the layer before gives the target its features in the target's order
            got = torch_norm(given, weight, bias, dtype, self.device, centred, epsilon_, layer.multiplies_by)
            return got, self._freed(np.asarray(wanted[dtype]), axes)

        return run, own.size

    def _epsilon(self, kind: Norm) -> float:
        return float(self.plan.facts[kind.epsilon] if isinstance(kind.epsilon, str) else kind.epsilon)

    def _affine(self, kind: Norm, rows: Array) -> tuple[Array | None, Array | None]:
        """Weight and bias of the target's norm: the tensor that is run, and the constant beside it, if there is one."""
        found = {self.step.role: rows}
        module = self.step.name.rpartition(".")[0]
        for one in kind.constants(self._layer):
            found[one.role] = self.written(kind.tensor_name(module, one.role, self._layer))
        return found.get("weight"), found.get("bias")

    def _group_norm(self, kind: GroupNorm, own: Array, rows: Array) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        x = self.rng.standard_normal((BATCH, POSITIONS, own.size)) * 3 + 1
        groups, factors = kind.count(own.size), (kind.multiplies_by, self._layer.multiplies_by)
        eps = self._epsilon(kind)
        pair = self._affine(kind, rows)
        run = group_norm_sides(x, own.reshape(-1), pair, groups, eps, factors, self.device)
        return run, own.size * POSITIONS

    def _batch_norm(self, kind: BatchNorm, own: Array, rows: Array) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        """The run of the whole layer, with all of its tensors."""
        module = self.step.name.rpartition(".")[0]
        steps = [s for s in self.plan.steps if s.role != COUNTER and s.name.rpartition(".")[0] == module]
        source = {
            s.role: self._unstacked(self.plan.source.read(s.parts[0].leaf), s.parts[0]).reshape(-1)
            for s in steps
            if s.parts
        }
        given = (
            (s.name.rpartition(".")[2], s) for s in steps
        )  # torch reads the statistics by their names, not by our roles
        written = {
            name if name.startswith("running_") else s.role: self.written(s.name).reshape(-1) for name, s in given
        }
        x = self.rng.standard_normal((4 * BATCH, own.size)) * 3 + 1
        factors = (kind.multiplies_by, self._layer.multiplies_by)
        return batch_norm_sides(x, source, written, self._epsilon(kind), factors, self.device), own.size

    def _embedding(self, own: Array, rows: Array) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        tokens = self.rng.integers(0, rows.shape[0], ENTRIES)  # rows that the target has; others are padding

        def run(dtype: str) -> tuple[Array, Array]:
            import jax.numpy as jnp
            import torch

            want = jnp.take(jnp.asarray(own), jnp.asarray(tokens), axis=0)
            table = tensor(rows, rows.dtype.name if rows.dtype.name in SHARED else "float64", self.device)
            got = torch.nn.functional.embedding(torch.as_tensor(tokens, device=self.device), table)
            return got.double().cpu().numpy(), self._freed(np.asarray(want).astype(np.float64), "..")

        return run, 1

    def _tied_head(self, own: Array, rows: Array, precision: str) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        """flax ``Embed.attend``: the query times the table turned; of a padded table the rows that the target has."""
        x = self.rng.standard_normal((BATCH, own.shape[1]))
        results = _jnp_einsum("zd,vd->zv", precision, x, own[: rows.shape[0]])

        def run(dtype: str) -> tuple[Array, Array]:
            return _torch_linear(x, rows, dtype, self.device), self._freed(results[dtype], "..")

        return run, rows.shape[-1]


def bound(precision: str, reduction: int) -> Tolerance:
    value = 8 * float(np.sqrt(max(reduction, 1))) * epsilon(precision)
    return Tolerance(value, f"8 x sqrt({reduction} summands) x eps({precision}): two orders of the same sum")


def _jnp_einsum(equation: str, precision: str, *operands: Array) -> dict[str, Array]:
    """`jnp.einsum` in float64 and in `precision`, as float64; a large weight by some of its output features at a time.

    NumPy casts the operands: a product alone is compiled by XLA in a tenth of the time that a product with casts takes.
    """
    import jax.numpy as jnp

    *given, weight = operands
    inputs, _, result = equation.partition("->")
    letters = inputs.split(",")[-1]
    own = [letter for letter in letters if letter in result and inputs.count(letter) == 1]
    split = max(own, key=lambda letter: weight.shape[letters.index(letter)], default="")
    axis, at, dots = letters.index(split), result.find(split), result.find("...")  # 0, 0 where nothing is split
    joined = at if at < dots or dots < 0 else at - len(result)  # an ellipsis stands for any number of axes
    count = min(-(-weight.size // WIDENED), weight.shape[axis]) if split else 1
    run = _compiled(_renamed(equation))
    made: dict[str, list[Array]] = {dtype: [] for dtype in ("float64", precision)}
    for block in np.array_split(weight, count, axis):
        for dtype, blocks in made.items():
            cast = (value.astype(jnp.dtype(dtype), copy=False) for value in (*given, block))
            blocks.append(np.asarray(run(*cast), np.float64))
    return {dtype: blocks[0] if count == 1 else np.concatenate(blocks, joined) for dtype, blocks in made.items()}


def _renamed(equation: str) -> str:
    """The same equation, its letters a, b, ... in the order in which they occur: layers of one shape compile once."""
    letters = dict.fromkeys(filter(str.isalpha, equation))
    return equation.translate(str.maketrans("".join(letters), ascii_letters[: len(letters)]))


@lru_cache(maxsize=256)
def _compiled(equation: str) -> Callable[..., jax.Array]:
    """Compiled once for operands of the same shapes and dtypes: a layer's come back in every layer."""
    import jax
    import jax.numpy as jnp

    return jax.jit(partial(jnp.einsum, equation))


def _torch_linear(x: Array, weight: Array, dtype: str, device: str) -> Array:
    """`torch.nn.functional.linear`, some output features at a time: a block of the weight fits into a cache."""
    import torch

    given = tensor(x, dtype, device)
    rows = max(1, BLOCK // weight.shape[1])
    blocks = [weight[k : k + rows] for k in range(0, weight.shape[0], rows)]
    y = torch.cat([torch.nn.functional.linear(given, tensor(block, dtype, device)) for block in blocks], dim=-1)
    return np.asarray(y.double().cpu().numpy())


def _torch_einsum(equation: str, x: Array, weight: Array, dtype: str, device: str) -> Array:
    import torch

    y = torch.einsum(equation, tensor(x, dtype, device), tensor(weight, dtype, device))
    return np.asarray(y.double().cpu().numpy())
