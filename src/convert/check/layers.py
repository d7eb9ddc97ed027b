"""Level 3: for each rule, the declared JAX operation with the source's weights against torch's layer with the written ones.

The operations are JAX's and torch's own (`jnp.einsum`, `F.linear`, ...); nothing of the plan's permutations is used on the
JAX side, so that a layout which does not follow from its equation shows. A wrong equation cannot show here: the model
level compares with upstream's code.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.check.compare import Difference, Tolerance, difference, epsilon
from convert.check.names import misplaced
from convert.check.report import Finding, LevelReport, Measure, Verdict
from convert.check.written import Written
from convert.einsum import Projection
from convert.kinds import Convolution, Embedding, LayerNorm, Linear, Rule, TargetLayer
from convert.kinds.conv import DimensionNumbers
from convert.kinds.norm import Norm
from convert.ops import Take, is_float
from convert.plan import Plan
from convert.steps import Part, Step
from convert.streaming import Work, read_used

if TYPE_CHECKING:
    import jax
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 18  # values of a weight that are widened at a time
BATCH = 3  # of each batch or time axis of an input: small, and no size of a layer
ELLIPSIS = "z"  # one axis stands for it; equations use letters of their own
ENTRIES = 17  # looked up in an embedding table


def check_layers(plan: Plan, written: Written, *, device: str = "cpu", seed: int = 0) -> LevelReport:
    """Runs every layer on random inputs in float64 and in the dtype of its weights.

    Args:
        device: where torch runs; JAX runs on its CPU.
    """
    if said := missing():
        return LevelReport("layers", Verdict.SKIPPED, said)
    layers = LayersPass(plan, written, device=device, seed=seed)
    with layers.running(), read_used(plan) as leaves:
        for leaf, work, array in leaves:
            layers.see(leaf, work, array)
        return layers.report()


def missing() -> str:
    """Why the layers level cannot run here; empty when it can."""
    try:
        import jax  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return ""


class LayersPass:
    """The layers level, fed with the source's leaves one by one, within `running`, in the thread that entered it."""

    def __init__(self, plan: Plan, written: Written, *, device: str, seed: int) -> None:
        self._plan, self._written, self._device, self._seed = plan, written, device, seed
        self._worst: dict[str, Measure] = {}
        self._failed: dict[str, list[str]] = {}
        self._findings: list[Finding] = []
        self._compared = 0
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Pins precision and threads of both frameworks."""
        import jax
        import torch

        with _jax_float64(jax), jax.default_matmul_precision("highest"), torch.no_grad(), _one_thread():
            yield

    def see(self, leaf: str, work: Work, array: Array) -> None:
        """Runs all layers that have weights of this leaf."""
        started = time.monotonic()
        for step, part in work:
            if self._written.specs.get(step.name) == step.spec:  # otherwise the coverage level names it
                self._run(step, part, array)
        self._seconds += time.monotonic() - started

    def _run(self, step: Step, part: Part, array: Array) -> None:
        rule = part.rule
        assert rule is not None
        if said := misplaced(self._plan, rule, step, part):
            self._findings.append(Finding(f"{step.name}: {said}", step.name, step.rule.line_only))
        probe = _Probe(rule, self._plan, step, part, self._device, np.random.default_rng(self._seed))
        try:
            measure = probe.measure(array, self._written.read(step.name))
        except (RuntimeError, ValueError, TypeError) as error:  # of JAX, torch or NumPy: shapes that do not fit
            self._findings.append(_unfit(step, part, error))
            return
        if measure is None:
            return
        self._compared += 1
        key = f"{step.rule.line_only} {step.role}"
        if not measure.passed:
            self._failed.setdefault(key, []).append(measure.name)
        if key not in self._worst or _badness(measure) > _badness(self._worst[key]):
            self._worst[key] = measure

    def report(self) -> LevelReport:
        """What came of it, once every leaf was seen."""
        started = time.monotonic()
        activations = _activations(self._plan)
        worst, findings = self._worst, list(self._findings)
        findings += [_finding(worst[key], names) for key, names in self._failed.items()]
        findings += [_finding(measure, [measure.name]) for measure in activations if not measure.passed]
        return LevelReport(
            "layers",
            Verdict.FAILED if findings else Verdict.PASSED if self._compared else Verdict.SKIPPED,
            ""
            if self._compared
            else "no tensor of the file has the name, shape and dtype that the rules give; see coverage",
            tuple(findings),
            (*worst.values(), *activations),
            (f"{self._compared} tensors in {len(worst)} groups; the worst of each is shown",),
            self._seconds + time.monotonic() - started,
        )


def _finding(measure: Measure, names: list[str]) -> Finding:
    """A rule whose layers differ: the worst of them, and which others."""
    exact = measure.lifted or measure.difference
    more = f" (and {len(names) - 1} more of this rule)" if len(names) > 1 else ""
    return Finding(
        f"{measure.name}{more}: torch's layer with the written weights gives {exact.got:.6g} where the declared JAX operation "
        f"gives {exact.want:.6g} at {list(exact.at)}: relative error {exact.relative:.1e} in float64, "
        f"{measure.difference.relative:.1e} in the weights' dtype",
        measure.name,
        measure.rule,
        {"tensors": names},
    )


def _unfit(step: Step, part: Part, error: Exception) -> Finding:
    return Finding(
        f"{step.name}: the layer cannot be run with what the plan makes of {part.leaf}: {' '.join(str(error).split())}",
        step.name,
        step.rule.line_only,
    )


@contextmanager
def _jax_float64(jax: Any) -> Iterator[None]:
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """A few rows times one matrix wait for memory, and threads that wait for each other make them ten times slower."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _badness(measure: Measure) -> float:
    lifted = measure.lifted or measure.difference
    return lifted.relative if np.isfinite(lifted.relative) else float("inf")


class _Probe:
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
        rows = written if self.part.rows is None else written[self.part.rows[0] : self.part.rows[1]]
        precision = self.step.spec.dtype if self.step.spec.dtype in ("float32", "bfloat16", "float16") else "float32"
        run, reduction = self._operation(own, rows, precision)
        exact = difference(*run("float64"), precision="float64")
        drift = difference(*run(precision), precision=precision)
        return Measure(
            self.step.name if self.part.rows is None else f"{self.step.name}[{self.part.rows[0]}:{self.part.rows[1]}]",
            drift,
            _bound(precision, reduction),
            exact,
            self._cast_bound(leaf, reduction),
            self.rule.at.line_only,
        )

    def _cast_bound(self, leaf: Array, reduction: int) -> Tolerance:
        """In float64 only what the written dtype lost may differ."""
        if not self.step.loses and not self.step.arithmetic:
            return _bound("float64", reduction)
        value = 2 * epsilon(self.step.spec.dtype)
        said = self.step.loses or f"rounded once to {self.step.spec.dtype} after '{self.step.arithmetic}'"
        return Tolerance(value, f"2 x eps({self.step.spec.dtype}): the weights were {said}")

    def _operation(self, own: Array, rows: Array, precision: str) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        kind = self.rule.kind
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
            y = np.asarray(results[dtype])
            if split and member is not None:
                y = np.take(y, member, wanted.index(split))
            return got, np.einsum(f"{order}->{''.join(batch)}{outputs}", y).reshape(*[BATCH] * len(batch), -1)

        return run, rows.shape[-1]

    def _bias(self, kind: Linear, own: Array, rows: Array) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        """A bias is added to the result; NumPy's broadcasting of the stored array says which value goes where."""
        equation = kind.equations[self.plan.choices[self.rule.choice] if self.rule.choice else ""]
        if self._layer.computes is not None:
            return (lambda dtype: (rows.astype(np.float64), own.astype(np.float64))), 1
        letters = equation.bias_axes(own.shape)
        sizes = dict(zip(letters, own.shape, strict=True))
        member = next((op.index for op in self.part.ops[len(self.rule.stacked) :] if isinstance(op, Take)), None)

        def run(dtype: str) -> tuple[Array, Array]:
            y = own.reshape([sizes[letter] for letter in letters if letter in equation.outputs])
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
            return got, np.asarray(results[dtype])

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
            got = _torch_norm(x, rows, dtype, self.device, centred, float(epsilon_), layer.multiplies_by)
            return got, np.asarray(wanted[dtype])

        return run, own.size

    def _embedding(self, own: Array, rows: Array) -> tuple[Callable[[str], tuple[Array, Array]], int]:
        tokens = self.rng.integers(0, rows.shape[0], ENTRIES)  # rows that the target has; others are padding

        def run(dtype: str) -> tuple[Array, Array]:
            import jax.numpy as jnp
            import torch

            want = jnp.take(jnp.asarray(own), jnp.asarray(tokens), axis=0)
            table = _tensor(rows, "float64", self.device)
            got = torch.nn.functional.embedding(torch.as_tensor(tokens, device=self.device), table)
            return got.cpu().numpy(), np.asarray(want).astype(np.float64)

        return run, 1


def _bound(precision: str, reduction: int) -> Tolerance:
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


ACTIVATIONS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "relu": ("relu", {}, "relu", {}),
    "silu": ("silu", {}, "silu", {}),
    "gelu_tanh": ("gelu", {"approximate": True}, "gelu", {"approximate": "tanh"}),
    "gelu_erf": ("gelu", {"approximate": False}, "gelu", {"approximate": "none"}),
    "tanh": ("tanh", {}, "tanh", {}),
    "sigmoid": ("sigmoid", {}, "sigmoid", {}),
    "softplus": ("softplus", {}, "softplus", {}),
    "elu": ("elu", {}, "elu", {}),
}


def activation_pair(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """``jax.nn``'s and ``torch.nn.functional``'s function of this name in a rule."""
    import jax

    ours, left, _, _ = ACTIVATIONS[name]
    one: Callable[..., jax.Array] = getattr(jax.nn, ours)
    return (lambda x: one(x, **left)), torch_activation(name)


def torch_activation(name: str) -> Callable[[Any], Any]:
    """``torch.nn.functional``'s function of this name in a rule; needs no JAX."""
    import torch

    _, _, theirs, right = ACTIVATIONS[name]
    two = getattr(torch.nn.functional, theirs)
    return lambda x: two(x, **right)


def _activations(plan: Plan) -> list[Measure]:
    """Each activation that the rules declare, over the range where its variants differ most and where it saturates."""
    import jax.numpy as jnp
    import torch

    x = np.linspace(-12, 12, 4801)
    found = {
        str(layer["activation"]): str(layer["layer"]) for layer in plan.layers if layer.get("activation") in ACTIVATIONS
    }
    measures = []
    for name, layer in found.items():
        one, two = activation_pair(name)
        want = np.asarray(one(jnp.asarray(x)))
        exact = difference(two(torch.tensor(x)).numpy(), want, precision="float64")
        drift: Difference = difference(
            two(torch.tensor(x, dtype=torch.float32)).numpy(), np.asarray(one(jnp.asarray(x, "float32")))
        )
        measures.append(Measure(f"{name} (after {layer})", drift, _bound("float32", 1), exact, _bound("float64", 1)))
    return measures
