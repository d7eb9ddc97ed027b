"""Control paths and neural CDEs: every fact against diffrax, torchcde and torchdiffeq themselves, in float64; the rules for stored
coefficients; the example, both ways. Nothing here is compared with a formula of ours alone."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from support.paths import EXAMPLES

diffrax = pytest.importorskip("diffrax")
torchcde = pytest.importorskip("torchcde")
eqx = pytest.importorskip("equinox")

from convert.api import convert, plan_conversion  # noqa: E402
from convert.core.errors import PlanError, RuleError  # noqa: E402
from convert.core.ops import apply, inverse  # noqa: E402
from convert.layers import CubicSpline, LinearInterpolation  # noqa: E402
from convert.layers.control_path.probe import jax_path, torch_path  # noqa: E402
from convert.references import neural_cde  # noqa: E402
from convert.rules.parse import parse_rules  # noqa: E402
from convert.verify.report.report import Verdict  # noqa: E402
from convert.verify.run import check  # noqa: E402
from support.memory_source import MemorySource, rule_file  # noqa: E402

EXAMPLE = EXAMPLES / "cde"
B, T, C = 2, 7, 3
RNG = np.random.default_rng(0)
TS = np.cumsum(RNG.uniform(0.2, 1.7, T))
YS = RNG.normal(size=(B, T, C))
AT = np.concatenate([TS, (TS[1:] + TS[:-1]) / 2, TS[:-1] + 0.01, [TS[0] - 1.3, TS[0] - 0.1, TS[-1] + 0.2, TS[-1] + 2]])
EXACT = 1e-12
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def relative(got: Any, want: Any) -> float:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())


def of_diffrax(kind: str, method: str, ys: Array = YS, at: Array = AT, **options: Any) -> Array:
    """As diffrax is to be used: one series and one time at a time."""

    def one(y: Any) -> Any:
        ts = jnp.asarray(TS)
        path = diffrax.LinearInterpolation(ts, y) if kind == "linear" else diffrax.CubicInterpolation(ts, diffrax.backward_hermite_coefficients(ts, y))  # fmt: skip
        return jax.vmap(lambda t: getattr(path, method)(t, **options))(jnp.asarray(at))

    return np.asarray(jax.vmap(one)(jnp.asarray(ys)))


def of_torchcde(kind: str, method: str, ys: Array = YS, at: Array = AT, times: Any = TS) -> Array:
    t = None if times is None else torch.tensor(times)
    data = torch.tensor(ys)
    path = torchcde.LinearInterpolation(torchcde.linear_interpolation_coeffs(data, t), t) if kind == "linear" else torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(data, t), t)  # fmt: skip
    return np.asarray(getattr(path, method)(torch.tensor(at)).numpy())


def coefficients(ys: Array = YS) -> tuple[Array, ...]:
    """diffrax's (d, c, b, a), each (B, T-1, C)."""
    made = jax.vmap(lambda y: diffrax.backward_hermite_coefficients(jnp.asarray(TS), y))(jnp.asarray(ys))
    return tuple(np.asarray(x) for x in made)


# ---- facts: the two libraries


@pytest.mark.parametrize("kind", ["linear", "cubic"])
@pytest.mark.parametrize("method", ["evaluate", "derivative"])
def test_the_libraries_agree_at_knots_between_and_outside(kind: str, method: str) -> None:
    """Irregular times, a batch; and our own NumPy, which names faults, with both."""
    want = of_torchcde(kind, method)
    assert relative(of_diffrax(kind, method), want) < EXACT
    made = neural_cde.linear(TS, YS, AT) if kind == "linear" else neural_cde.cubic(TS, neural_cde.hermite(TS, YS), AT)  # fmt: skip
    assert relative(made[method == "derivative"], want) < EXACT


def test_linear_derivatives_differ_at_inner_knots_only() -> None:
    right = of_diffrax("linear", "derivative", left=False)
    assert set(np.where(np.abs(right - of_torchcde("linear", "derivative")).max((0, 2)) > 1e-9)[0]) == set(
        range(1, T - 1)
    )
    assert relative(neural_cde.linear(TS, YS, AT, right=True)[1], right) < EXACT
    assert relative(of_diffrax("cubic", "derivative", left=False), of_torchcde("cubic", "derivative")) < EXACT  # smooth


@pytest.mark.slow
def test_a_vector_of_times_broadcasts_or_fails() -> None:
    """diffrax#619: `derivative` takes one time. With T of them (T, C) is divided by (T,): that fits when C is 1, or T."""
    ts, at = jnp.asarray(TS), jnp.asarray(TS)
    assert diffrax.LinearInterpolation(ts, jnp.zeros((T, B, 1))).derivative(at).shape == (T, B, T)
    for width in (1, T):
        ys = RNG.normal(size=(T, width))
        path = diffrax.LinearInterpolation(ts, jnp.asarray(ys))
        for of, method in (("value", "evaluate"), ("slope", "derivative")):
            variants = {v.name: v for v in neural_cde.path_variants("linear", of, times="t", data="y", at="x")}
            seen = neural_cde.Observed({}, {"t": TS, "y": ys, "x": TS}, {})
            made = variants[neural_cde.BROADCAST].make(seen)
            assert relative(made, getattr(path, method)(at)) < EXACT
            assert made.shape == (T, T)
    with pytest.raises(ValueError, match="broadcasting"):
        diffrax.LinearInterpolation(ts, jnp.zeros((T, C))).derivative(at)


def test_coefficients_are_reordered_with_factors() -> None:
    d, c, b, a = coefficients()
    want = torchcde.hermite_cubic_coefficients_with_backward_differences(torch.tensor(YS), torch.tensor(TS)).numpy()
    assert relative(np.concatenate([a, b, 2 * c, 3 * d], -1), want) < EXACT
    for wrong in ((a, b, c, d), (d, c, b, a), (a, b, 3 * c, 2 * d)):
        assert relative(np.concatenate(wrong, -1), want) > 0.1


def test_natural_cubics_pass_through_but_are_another_curve() -> None:
    """diffrax has no constructor for them; their coefficients are coefficients."""
    made = torchcde.natural_cubic_coeffs(torch.tensor(YS), torch.tensor(TS))
    a, b, c2, d3 = (x.numpy() for x in made.chunk(4, -1))
    ours = neural_cde.natural(TS, YS)
    assert max(relative(x, y) for x, y in zip(ours, (a, b, c2 / 2, d3 / 3), strict=True)) < EXACT
    path = [jnp.asarray(x) for x in (d3 / 3, c2 / 2, b, a)]
    got = jax.vmap(lambda *k: jax.vmap(diffrax.CubicInterpolation(jnp.asarray(TS), k).evaluate)(jnp.asarray(AT)))(*path)
    assert relative(got, torchcde.CubicSpline(made, torch.tensor(TS)).evaluate(torch.tensor(AT)).numpy()) < EXACT
    assert relative(of_torchcde("cubic", "evaluate"), got) > 0.01


@pytest.mark.slow
def test_missing_data() -> None:
    """Inside, both interpolate; at the ends torchcde repeats what it has and diffrax keeps NaN unless told; Hermite paths over
    gaps differ, unless the gaps are filled first."""
    ys = YS.copy()
    ys[0, 0, 0] = ys[0, 3, 0] = ys[0, 4, 0] = ys[1, 6, 2] = ys[1, 2, 1] = np.nan
    ts, t = jnp.asarray(TS), torch.tensor(TS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        linear = torchcde.linear_interpolation_coeffs(torch.tensor(ys), t).numpy()
        hermite = torchcde.hermite_cubic_coefficients_with_backward_differences(torch.tensor(ys), t).numpy()
    ours = np.asarray(jax.vmap(lambda y: diffrax.linear_interpolation(ts, y))(jnp.asarray(ys)))
    assert np.argwhere(np.isnan(ours)).tolist() == [[0, 0, 0], [1, 6, 2]] and not np.isnan(linear).any()
    known = ~np.isnan(ours)
    assert relative(ours[known], linear[known]) < EXACT
    first = np.array([[series[~np.isnan(series)][0] for series in y.T] for y in ys])

    def filled(y: Any, start: Any) -> Any:
        return diffrax.linear_interpolation(ts, y, fill_forward_nans_at_end=True, replace_nans_at_start=start)

    assert relative(jax.vmap(filled)(jnp.asarray(ys), jnp.asarray(first)), linear) < EXACT

    def gaps(y: Any, start: Any) -> Any:
        return diffrax.backward_hermite_coefficients(ts, y, fill_forward_nans_at_end=True, replace_nans_at_start=start)

    d, c, b, a = (np.asarray(x) for x in jax.vmap(gaps)(jnp.asarray(ys), jnp.asarray(first)))
    assert relative(np.concatenate([a, b, 2 * c, 3 * d], -1), hermite) > 0.1
    d, c, b, a = coefficients(linear)
    assert relative(np.concatenate([a, b, 2 * c, 3 * d], -1), hermite) < EXACT


def test_rectilinear_paths_agree() -> None:
    def one(y: Any) -> Any:
        times, data = diffrax.rectilinear_interpolation(jnp.asarray(TS), y)
        return jnp.concatenate([times[:, None], data], -1)

    data = np.concatenate([np.broadcast_to(TS[:, None], (B, T, 1)), YS], -1)
    want = torchcde.linear_interpolation_coeffs(torch.tensor(data), rectilinear=0).numpy()
    assert relative(jax.vmap(one)(jnp.asarray(YS)), want) < EXACT


def test_default_times_are_indices() -> None:
    """torchcde without times takes 0, 1, 2, ...; diffrax always wants them."""
    assert relative(of_torchcde("linear", "derivative", times=None), of_torchcde("linear", "derivative")) > 0.1
    variants = {v.name: v for v in neural_cde.path_variants("linear", "slope", times="t", data="y", at="x")}
    seen = neural_cde.Observed({}, {"t": TS, "y": YS, "x": AT}, {})
    assert relative(variants[neural_cde.UNIT].make(seen), of_torchcde("linear", "derivative", times=None)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("data", [None, "CTN", "T"])
def test_the_layers_level_computes_as_the_libraries_do(data: str | None) -> None:
    """Both sides of it, for every place of the time axis; and with buffers as with one tensor."""
    letters = data or "NTC"
    order = ["NTC".index(x) for x in letters]
    ys = YS[0, :, 0] if data == "T" else YS.transpose(order)
    batch = YS[:1, :, :1] if data == "T" else YS
    linear, cubic = LinearInterpolation(data), CubicSpline(data)
    want = {k: np.stack([of_torchcde(k, m, batch) for m in ("evaluate", "derivative")]).swapaxes(1, 2) for k in ("linear", "cubic")}  # fmt: skip
    own = {"knots": linear.series(ys)}
    roles = {"knots": apply(linear.movement(ys.shape), ys), "times": TS}
    assert relative(jax_path(own, TS, AT, "float64", cubic=False), want["linear"]) < EXACT
    assert relative(torch_path(roles, AT, "float64", cubic=False), want["linear"]) < EXACT
    pieces = dict(zip("dcba", coefficients(batch), strict=True))
    stored = {role: x[0, :, 0] if data == "T" else x.transpose(order) for role, x in pieces.items()}
    series = {role: cubic.series(x) for role, x in stored.items()}
    assert relative(jax_path(series, TS, AT, "float64", cubic=True), want["cubic"]) < EXACT
    buffers = {role: apply((*cubic.movement(x.shape), *cubic.arithmetic(role)), x) for role, x in stored.items()}
    assert relative(torch_path({**buffers, "times": TS}, AT, "float64", cubic=True), want["cubic"]) < EXACT
    whole = {"coeffs": np.concatenate([buffers[role] for role in "abcd"], -1), "times": TS}
    assert relative(torch_path(whole, AT, "float64", cubic=True), want["cubic"]) < EXACT


def test_softplus_is_cut_off_in_torch() -> None:
    """Above its threshold of 20, torch's is the identity."""
    x = np.linspace(-30, 30, 6001)
    apart = np.abs(torch.nn.functional.softplus(torch.tensor(x)).numpy() - np.asarray(jax.nn.softplus(jnp.asarray(x))))
    assert 2.0e-9 < apart.max() < 2.1e-9 and apart[x <= 20].max() < 1e-14
    whole = torch.nn.functional.softplus(torch.tensor(x), threshold=100).numpy()
    assert relative(whole, jax.nn.softplus(jnp.asarray(x))) < EXACT


# ---- the rules for stored coefficients

HEADER = "model: m\ntitle: m\ntargets: {torch: {loads: x}}\nrules:\n"
CUBIC = HEADER + "- cubic_spline: {coeffs: x, times: t}\n  from: x\n"
LINEAR = HEADER + "- linear_interpolation: {coeffs: x, times: t}\n  from: x\n"


def stored(data: str = "NTC", dtype: str = "float64", **more: Array) -> MemorySource:
    order = ["NTC".index(x) for x in data]
    leaves = {
        f"x/coeffs/{k}": np.ascontiguousarray(x.transpose(order)).astype(dtype) for k, x in enumerate(coefficients())
    }
    return MemorySource({"x/ts": TS.astype(dtype), **leaves, **more})


def written(rules: str, source: MemorySource, folder: Path, **options: Any) -> dict[str, Array]:
    (folder / "r.yaml").write_text(rules)
    convert(str(folder / "r.yaml"), source, folder / "out.safetensors", **options)
    return dict(load_file(folder / "out.safetensors"))


def tensors(rules: str, source: MemorySource) -> dict[str, Array]:
    """What a plan makes, without a file."""
    from convert.layers.step_tensor import expected

    plan = plan_conversion(parse_rules(rules), source)
    return {step.name: expected(step, source) for step in plan.steps}


@pytest.mark.slow
@pytest.mark.parametrize("data", ["NTC", "TCN"])
def test_coefficients_become_torchcdes(data: str, tmp_path: Path) -> None:
    """Bit for bit what torchcde keeps of diffrax's numbers, and the same path; every check passes; the plan runs backwards."""
    rules, source = CUBIC + f"  data: {data}\n", stored(data)
    made = written(rules, source, tmp_path)
    d, c, b, a = coefficients()
    assert np.array_equal(made["x"], np.concatenate([a, b, 2 * c, 3 * d], -1)) and np.array_equal(made["t"], TS)
    path = torchcde.CubicSpline(torch.tensor(made["x"]), torch.tensor(made["t"]))
    assert relative(path.derivative(torch.tensor(AT)).numpy(), of_diffrax("cubic", "derivative")) < EXACT
    report = check(tmp_path / "out.safetensors", source, model=str(tmp_path / "r.yaml"))
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 3 + [Verdict.SKIPPED]
    plan = plan_conversion(str(tmp_path / "r.yaml"), source)
    for part in (part for step in plan.steps for part in step.parts):
        spec = source.leaves[part.leaf].spec
        step = next(step for step in plan.steps if part in step.parts)
        back = apply(inverse(part.ops, spec), part.share(made[step.name]))
        assert relative(back, source.read(part.leaf)) < 1e-15
    assert next(u for u in plan.shape_ambiguous if "x" in u.names).parts == tuple(f"x/coeffs/{k}" for k in (3, 2, 1, 0))


@pytest.mark.slow
def test_a_stored_path_of_equinox_fills_torchcdes_buffers(tmp_path: Path) -> None:
    """An Equinox file with a diffrax path in it goes into a module that has it as a submodule; strictly."""
    d, c, b, a = (jnp.asarray(x[0], jnp.float32) for x in coefficients())
    model = {"control": diffrax.CubicInterpolation(jnp.asarray(TS, jnp.float32), (d, c, b, a)), "gain": jnp.ones(3)}
    eqx.tree_serialise_leaves(tmp_path / "model.eqx", model)
    records = "leaf_names: [control/ts, control/coeffs/0, control/coeffs/1, control/coeffs/2, control/coeffs/3, gain]\n"
    rules = (
        HEADER.replace("rules:", records + "rules:")
        + "- cubic_spline: model.path\n  from: control\n- parameter: gain\n  from: gain\n"
    )
    (tmp_path / "r.yaml").write_text(rules)
    convert(str(tmp_path / "r.yaml"), tmp_path / "model.eqx", tmp_path / "out.safetensors")
    state = {name: torch.tensor(x) for name, x in load_file(tmp_path / "out.safetensors").items()}
    module = torch.nn.Module()
    module.model = torch.nn.Module()
    module.model.path = torchcde.CubicSpline(torch.zeros(T - 1, 4 * C), torch.zeros(T))
    module.gain = torch.nn.Parameter(torch.zeros(3))
    module.load_state_dict(state, strict=True)
    got = module.model.path.derivative(torch.tensor(AT, dtype=torch.float32)).numpy()
    assert relative(got, of_diffrax("cubic", "derivative")[0]) < 1e-5
    report = check(tmp_path / "out.safetensors", tmp_path / "model.eqx", model=str(tmp_path / "r.yaml"))
    assert [str(level.verdict) for level in report.levels] == ["passed"] * 3 + ["skipped"]


def test_stacked_paths_and_other_names() -> None:
    """A stack of paths on one grid, coefficients that are called otherwise, data without channels, alternatives in the path."""
    d, c, b, a = coefficients()
    leaves = {f"p/{role}": x for role, x in zip("dcba", (d, c, b, a), strict=True)}
    rules = (
        HEADER
        + "- cubic_spline: {coeffs: 'x.{i}', times: 't.{i}'}\n  from: p\n  stacked: {i: 0}\n  leaves: {d: d, c: c, b: b, a: a, times: /grid}\n"
    )
    made = tensors(rules, MemorySource({**leaves, "grid": TS}))
    assert sorted(made) == ["t.0", "t.1", "x.0", "x.1"]
    assert np.array_equal(made["x.1"], np.concatenate([a[1], b[1], 2 * c[1], 3 * d[1]], -1))
    made = tensors(LINEAR, MemorySource({"x/ys": YS[0, :, 0], "x/ts": TS}))
    assert np.array_equal(made["x"], YS[0, :, :1])
    both = LINEAR.replace("from: x", "from: '{train,test}'").replace("coeffs: x, times: t", "coeffs: '{train,test}', times: '{train,test}_t'")  # fmt: skip
    made = tensors(both, MemorySource({"train/ys": YS, "train/ts": TS, "test/ys": YS[:1], "test/ts": TS + 1}))
    assert np.array_equal(made["test_t"], TS + 1) and made["test"].shape == (1, T, C)
    made = tensors(LINEAR.replace(", times: t", ""), MemorySource({"x/ys": YS}))
    assert list(made) == ["x"]


def test_times_are_never_rounded() -> None:
    """Whatever the coefficients are written in; torchcde takes times of another dtype."""
    made = tensors(CUBIC + "  dtype: bfloat16\n", stored(dtype="float32"))
    assert made["x"].dtype.name == "bfloat16" and made["t"].dtype.name == "float32"


class TestRefusals:
    CASES: ClassVar[dict[str, tuple[str, MemorySource, str]]] = {
        "times of another length": (CUBIC, MemorySource({"x/ts": TS[:-1], **{f"x/coeffs/{k}": np.zeros((T - 1, C)) for k in range(4)}}), "x/coeffs/0: expected 5 intervals along T, for the 6 times of x/ts, got 6: float64[6,3] as T C; name the time axis with `data:`"),
        "time first, not said": (LINEAR, MemorySource({"x/ts": TS, "x/ys": YS.swapaxes(0, 1)}), "x/ys: expected 7 knots along T, for the 7 times of x/ts, got 2: float64[7,2,3] as N T C"),
        "a grid for each series": (LINEAR, MemorySource({"x/ts": np.stack([TS, TS]), "x/ys": YS}), "torchcde.LinearInterpolation has the same times for all series of a batch, got "),
        "coefficients of two shapes": (CUBIC, MemorySource({"x/ts": TS, **{f"x/coeffs/{k}": np.zeros((T - 1, C + (k == 2))) for k in range(4)}}), "expected the shape of x/coeffs/0: "),
        "three coefficients": (CUBIC, MemorySource({"x/ts": TS, **{f"x/coeffs/{k}": np.zeros((T - 1, C)) for k in range(3)}}), "x/coeffs/3 (cubic_spline, a): expected a leaf"),
        "times that go nowhere": (LINEAR.replace(", times: t", ""), MemorySource({"x/ts": TS, "x/ys": YS}), "without them torchcde.LinearInterpolation takes 0, 1, 2, ...; name their tensor in the target with `times:`"),
        "times that nobody has": (LINEAR, MemorySource({"x/ys": YS}), "no leaf has the times of x, for t; name the leaf with `leaves: {times: ...}`"),
        "integers": (LINEAR, MemorySource({"x/ys": YS.astype(np.int32), "x/ts": TS}), "a path's coefficients and times are floats"),
        "axes that do not fit": (LINEAR + "  data: TC\n", MemorySource({"x/ys": YS, "x/ts": TS}), "the rule gives its data the axes T C"),
    }  # fmt: skip

    @pytest.mark.parametrize("name", CASES)
    def test_of_a_checkpoint(self, name: str) -> None:
        rules, source, said = self.CASES[name]
        with pytest.raises(PlanError) as caught:
            plan_conversion(parse_rules(rules), source)
        assert said in str(caught.value)

    @pytest.mark.parametrize(
        ("rules", "said"),
        [
            (HEADER + "- linear_interpolation: path\n  from: x\n", "keeps its slopes, (x[i+1] - x[i]) / (t[i+1] - t[i]), in a buffer `_derivs` that no leaf holds; write its knots"),
            (HEADER + "- cubic_spline: {times: t, module: x}\n  from: x\n", "the module keeps its times in its own buffer; leave `times:` out"),
            (HEADER + "- cubic_spline: {coeffs: x, module: x}\n  from: x\n", "give one of the two"),
            (CUBIC + "  data: NC\n", "'NC' has no T: one axis of a path's data is time"),
            (CUBIC + "  data: TT\n", "are different capital letters, such as NTC, not 'TT'"),
            (CUBIC + "  leaves: {e: x}\n", "unknown key 'e' in `leaves`"),
        ],
    )  # fmt: skip
    def test_of_a_rule(self, rules: str, said: str) -> None:
        with pytest.raises(RuleError) as caught:
            parse_rules(rules)
        assert (said in str(caught.value) and "rules.yaml:5" in str(caught.value)) or "rules.yaml:6" in str(caught.value) or "rules.yaml:7" in str(caught.value)  # fmt: skip


# ---- solutions


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cde_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> Iterator[tuple[Any, Any, Any]]:
    before = {name: sys.modules.get(name) for name in ("model_jax", "model_torch", "reference")}
    yield tuple(_load(name) for name in before)  # type: ignore[misc]
    for name, module in before.items():
        sys.modules.pop(name)
        if module is not None:
            sys.modules[name] = module


class ThreeEighths(diffrax.AbstractERK):  # type: ignore[misc, name-defined]
    """torchdiffeq's ``rk4`` in diffrax: its tableau given to diffrax's own explicit Runge-Kutta solver."""

    term_structure: ClassVar[Any] = diffrax.AbstractTerm
    tableau: ClassVar[Any] = diffrax.ButcherTableau(
        c=np.array([1 / 3, 2 / 3, 1.0]),
        b_sol=np.array([1 / 8, 3 / 8, 3 / 8, 1 / 8]),
        b_error=np.zeros(4),
        a_lower=(np.array([1 / 3]), np.array([-1 / 3, 1.0]), np.array([1.0, -1.0, 1.0])),
    )
    interpolation_cls: ClassVar[Any] = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k

    def order(self, terms: Any) -> int:
        return 4


SOLVERS = [(diffrax.Euler, "euler", "Euler"), (diffrax.Midpoint, "midpoint", "midpoint"), (diffrax.Heun, "heun2", "Heun"), (ThreeEighths, "rk4", "RK4, 3/8 rule")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "cubic"])
def test_solvers_that_both_sides_have(kind: str, example: tuple[Any, Any, Any]) -> None:
    """The states of the whole solution: `diffeqsolve`, diffrax's solver step by step, torchcde's `cdeint`, and our NumPy."""
    model_jax, model_torch, reference = example
    model = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_array(x) else x, model_jax.make())
    ts, ys = model_jax.series(3)
    ts, ys = ts.astype(np.float64), ys.astype(np.float64)
    module = model_torch.NeuralCDE(*reference.SIZES, kind=kind, method="euler").double()
    flat = {"initial": model.initial, "readout": model.readout, **{f"field.layers.{k}": x for k, x in enumerate(model.field.mlp.layers)}}  # fmt: skip
    module.load_state_dict({f"{name}.{part}": torch.tensor(np.array(getattr(x, part))) for name, x in flat.items() for part in ("weight", "bias")})  # fmt: skip
    inputs = {"ts": ts, "ys": ys}
    for solver, method, known in SOLVERS if kind == "cubic" else SOLVERS[:1]:
        module.method = method
        with torch.no_grad():
            want = module(torch.tensor(ts), torch.tensor(ys))[0].numpy()

        def one(y: Any, solve: Any, solver: Any = solver) -> Any:
            return solve(model, jnp.asarray(ts), model_jax.control(jnp.asarray(ts), y, kind), solver())

        # `diffeqsolve` compiles for long, so it is run with one method for each path.
        whole = (model_jax.solve,) if (kind, method) in (("linear", "euler"), ("cubic", "midpoint")) else ()
        for solve in (reference.steps, *whole):
            assert relative(jax.vmap(lambda y, solve=solve: one(y, solve))(jnp.asarray(ys)), want) < EXACT, (
                method,
                solve,
            )
        weights = {name: x.numpy() for name, x in module.state_dict().items()}
        seen = neural_cde.Observed({"initial": want[:, 0]}, inputs, weights)
        variants = {v.name: v for v in neural_cde.solution_variants(kind, known, times="ts", data="ys", field=reference.field_of, start="initial")}  # fmt: skip
        assert relative(variants[known].make(seen), want) < EXACT
        # At the knots, where Euler's and Heun's methods look, a backward-Hermite path has the linear one's left derivative.
        alike = {known, neural_cde.HERMITE, neural_cde.LINEAR} if method in ("euler", "heun2") else {known}
        alike |= {f"{known} with the {neural_cde.RIGHT}"} if kind == "cubic" else set()
        assert min(relative(v.make(seen), want) for name, v in variants.items() if name not in alike) > 1e-7
        if method == "rk4":
            assert relative(variants["classical RK4"].make(seen), want) > 1e-7


@pytest.mark.slow
def test_control_terms_without_to_ode_take_increments(example: tuple[Any, Any, Any]) -> None:
    """diffrax's ControlTerm by itself multiplies with X(t1) - X(t0); torchcde always with dX/dt."""
    model_jax, _, reference = example
    model = jax.tree.map(lambda x: x.astype(jnp.float64) if eqx.is_array(x) else x, model_jax.make())
    ts, ys = (x.astype(np.float64) for x in model_jax.series(3))
    path = model_jax.control(jnp.asarray(ts), jnp.asarray(ys[0]), "cubic")
    terms = diffrax.ControlTerm(lambda t, z, args: model.field(z), path)
    got = diffrax.diffeqsolve(terms, diffrax.Euler(), ts[0], ts[-1], None, model.initial(path.evaluate(ts[0])), stepsize_controller=diffrax.StepTo(jnp.asarray(ts)), saveat=diffrax.SaveAt(ts=jnp.asarray(ts))).ys  # fmt: skip
    weights = {f"field.layers.{k}.{part}": np.asarray(getattr(x, part)) for k, x in enumerate(model.field.mlp.layers) for part in ("weight", "bias")}  # fmt: skip
    seen = neural_cde.Observed({"initial": np.asarray(got)[:1]}, {"ts": ts, "ys": ys[:1]}, weights)
    variants = {v.name: v for v in neural_cde.solution_variants("cubic", "Euler", times="ts", data="ys", field=reference.field_of, start="initial")}  # fmt: skip
    assert relative(variants[neural_cde.INCREMENTS].make(seen)[0], got) < EXACT


def test_coefficients_that_stack_different_numbers_of_paths_are_refused() -> None:
    """It was an internal error: the third path had no c."""
    leaves = {f"c/coeffs/{k}": np.zeros((2 if k == 1 else 3, 5, 2), np.float32) for k in range(4)}
    rules = rule_file("- cubic_spline: m.{s}.X\n  from: c\n  stacked: {s: 0}")
    said = r"r.yaml:5: c/coeffs/1 \[shape-mismatch\]: expected 3 layers on the stacked axis 0, as c/coeffs/0: float32\[3,5,2\] has, got float32\[2,5,2\]"
    with pytest.raises(PlanError, match=said):
        plan_conversion(rules, MemorySource({**leaves, "c/ts": np.zeros(6, np.float32)}))
