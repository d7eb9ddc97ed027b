"""The laws of the primitive operations, for random specs of every dtype."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import TensorSpec
from convert.core import ops
from convert.core.errors import ConvertError
from convert.core.ops import Deinterleave, Flip, Interleave, Op, Pad, Permute, Place, Reorder, Reshape, Slice, Take
from convert.core.tensor_spec import SAFETENSORS_TAGS, dtype_name, is_float, numpy_dtype, widens
from convert.core.value_ops import Add, Cast, Multiply

DTYPES = tuple(SAFETENSORS_TAGS)
NARROW_INTS = ("int4", "uint4", "int2", "uint2")  # NumPy keeps one in a byte; other bits of the byte mean nothing


def random_array(spec: TensorSpec, seed: int) -> np.ndarray:
    """Random bits: every value of the dtype, NaNs, infinities and negative zeros included."""
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(spec.dtype)
    if spec.dtype == "bool":
        return rng.integers(0, 2, spec.shape).astype(bool)
    if spec.dtype in NARROW_INTS:
        info = ml_dtypes.iinfo(dtype)
        return rng.integers(info.min, int(info.max) + 1, spec.shape).astype(np.int8).astype(dtype)
    return np.frombuffer(rng.bytes(spec.nbytes), dtype).reshape(spec.shape)


def spec_of(x: np.ndarray) -> TensorSpec:
    return TensorSpec(x.shape, dtype_name(x.dtype))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def specs(dtypes: tuple[str, ...] = DTYPES) -> st.SearchStrategy[TensorSpec]:
    return st.builds(TensorSpec, st.lists(st.integers(0, 4), max_size=4).map(tuple), st.sampled_from(dtypes))


@st.composite
def movements(draw: st.DrawFn, shape: tuple[int, ...], kinds: tuple[type[Op], ...]) -> Op:
    """An operation that fits an array of this shape."""
    kind = draw(st.sampled_from(kinds))
    axes = range(len(shape))
    if kind is Permute:
        return Permute(tuple(draw(st.permutations(axes))))
    if kind is Reshape:
        left, new = math.prod(shape), []
        if left == 0:
            return Reshape(tuple(draw(st.permutations((0, draw(st.integers(0, 5)))))))
        while left > 1:
            new.append(draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0])))
            left //= new[-1]
        new += [1] * draw(st.integers(0, 2))
        return Reshape(tuple(draw(st.permutations(new))))
    if kind is Flip:
        return Flip(tuple(sorted(draw(st.sets(st.sampled_from(axes))))) if axes else ())
    even = [axis for axis in axes if shape[axis] % 2 == 0]
    if kind in (Deinterleave, Interleave) and even:
        axis = draw(st.sampled_from(even))
        widths = [n for n in range(2, shape[axis] + 1, 2) if shape[axis] % n == 0]
        start = 2 * draw(st.integers(0, shape[axis] // 2 - 1)) if shape[axis] else 0
        within = (shape[axis], start, shape[axis]) if shape[axis] and draw(st.booleans()) else None
        return kind(
            axis, draw(st.sampled_from([None, *widths])) if within is None else draw(st.sampled_from([None, 2])), within
        )
    if kind is Place or not axes:  # the others need an axis
        size = draw(st.integers(1, 4))
        return Place(draw(st.integers(0, len(shape))), draw(st.integers(0, size - 1)), size)
    axis = draw(st.sampled_from(axes))
    if kind is Reorder:
        return draw(reorders(axis, shape[axis]))
    if kind is Pad:
        return Pad(axis, draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    if kind is Take and shape[axis]:
        return Take(axis, draw(st.integers(0, shape[axis] - 1)))
    start = draw(st.integers(0, shape[axis]))
    return Slice(axis, start, draw(st.integers(start, shape[axis])))


MOVEMENTS = (Permute, Reshape, Flip, Deinterleave, Interleave, Reorder, Slice, Take, Pad, Place)
BIJECTIVE = (Permute, Reshape, Flip, Deinterleave, Interleave)


@st.composite
def reorders(draw: st.DrawFn, axis: int, size: int) -> Reorder:
    """An axis of this size in parts, some of them empty, in any order."""
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=4)))
    lengths = tuple(int(n) for n in np.diff([0, *cuts, size]))
    return Reorder(axis, lengths, tuple(draw(st.permutations(range(len(lengths))))))


@st.composite
def pipelines(draw: st.DrawFn, most: int = 1) -> tuple[TensorSpec, tuple[Op, ...]]:
    spec = current = draw(specs())
    made: list[Op] = []
    for _ in range(draw(st.integers(1, most))):
        made.append(draw(movements(current.shape, MOVEMENTS)))
        current = made[-1].out_spec(current)
    return spec, tuple(made)


seeds = st.integers(0, 2**32 - 1)


# --- operations that only move elements -----------------------------------------------------------------------------


@pytest.mark.slow
@given(st.data(), specs(), seeds)
@settings(max_examples=200, deadline=None)
def test_parts_in_another_order_are_what_concatenate_makes_of_them(
    data: st.DataObject, spec: TensorSpec, seed: int
) -> None:
    if not spec.shape:
        return
    axis = data.draw(st.integers(0, len(spec.shape) - 1))
    op = data.draw(reorders(axis, spec.shape[axis]))
    x = random_array(spec, seed)
    parts = np.split(x, np.cumsum(op.lengths)[:-1], axis)
    made = np.concatenate([parts[k] for k in op.order], axis)
    assert same_bits(op.apply(x), made)
    assert same_bits(op.inverse(spec).apply(made), x)


@pytest.mark.slow
@given(pipelines(), seeds)
@settings(max_examples=400, deadline=None)
def test_laws_of_one_movement(case: tuple[TensorSpec, tuple[Op, ...]], seed: int) -> None:
    spec, (op,) = case
    x = random_array(spec, seed)
    y = op.apply(x)
    assert isinstance(y, np.ndarray)
    out = op.out_spec(spec)
    assert spec_of(y) == out
    back = op.inverse(spec)
    assert back.out_spec(out) == spec
    assert spec_of(back.apply(y)) == spec
    assert same_bits(op.apply(back.apply(y)), y)
    if not isinstance(op, Slice | Take):  # nothing was left out
        assert same_bits(back.apply(y), x)
    if not isinstance(op, Pad | Place):  # every array of the result's spec is a result
        z = random_array(out, seed + 1)
        assert same_bits(op.apply(back.apply(z)), z)
    assert str(op)


@pytest.mark.slow
@given(pipelines(most=6), seeds)
@settings(max_examples=200, deadline=None)
def test_laws_of_a_pipeline(case: tuple[TensorSpec, tuple[Op, ...]], seed: int) -> None:
    spec, pipeline = case
    x = random_array(spec, seed)
    y = ops.apply(pipeline, x)
    assert spec_of(y) == ops.out_spec(pipeline, spec)
    back = ops.inverse(pipeline, spec)
    assert len(back) == len(pipeline)
    assert spec_of(ops.apply(back, y)) == spec
    assert same_bits(ops.apply(pipeline, ops.apply(back, y)), y)
    if all(isinstance(op, BIJECTIVE) for op in pipeline):
        assert same_bits(ops.apply(back, y), x)


def test_a_wrong_inverse_breaks_the_law() -> None:
    """The inverse of a permutation is not itself, once there are three axes."""
    x = random_array(TensorSpec((2, 3, 5), "float32"), 0)
    op = Permute((1, 2, 0))
    assert same_bits(op.apply(op.inverse(spec_of(x)).apply(op.apply(x))), op.apply(x))
    assert not same_bits(op.apply(op.apply(op.apply(x))), op.apply(x))


@pytest.mark.slow
@given(pipelines(), seeds)
def test_zeros_stand_where_elements_were_left_out(case: tuple[TensorSpec, tuple[Op, ...]], seed: int) -> None:
    spec, (op,) = case
    ones = np.ones(spec.shape, np.int32)
    y = op.apply(ones)
    assert op.inverse(TensorSpec(spec.shape, "int32")).apply(y).sum() == min(y.sum(), ones.sum())


def test_pairs_of_neighbours_become_pairs_a_half_apart() -> None:
    x = np.arange(12).reshape(2, 6)
    assert Deinterleave(1).apply(x).tolist() == [[0, 2, 4, 1, 3, 5], [6, 8, 10, 7, 9, 11]]
    assert Interleave(1).apply(x).tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
    y = np.arange(8)
    assert Deinterleave(0, 4).apply(y).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert Interleave(0, 4).apply(y).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    z = np.arange(12)
    assert Deinterleave(0, 4, (6, 0, 4)).apply(z).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert str(Interleave(0, 4, (6, 2, 6))) == "axis 0 interleaved in runs of 4 from 2 to 6 of each 6"
    for wrong in ((5, 0, 4), (6, 4, 8), (6, 0, 3), (6, 0, 2)):
        with pytest.raises(ValueError, match="of each|no pairs|not made of runs"):
            Deinterleave(0, 4, wrong).out_spec(TensorSpec((12,), "float32"))
    assert str(Deinterleave(0, 4)) == "axis 0 de-interleaved in runs of 4"
    assert [str(op) for op in (Deinterleave(1), Interleave(0))] == ["axis 1 de-interleaved", "axis 0 interleaved"]


@pytest.mark.parametrize("op", [Permute((2, 0, 1)), Slice(1, 1, 3), Take(0, 1), Flip((0, 2)), Reshape((6, 5))])
def test_movements_are_views(op: Op) -> None:
    x = np.arange(30.0).reshape(2, 3, 5)
    assert np.shares_memory(op.apply(x), x)


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Permute((0, 0, 1)), "(0, 0, 1) does not permute the axes of float32[2,3,5]"),
        (Permute((0, 1)), "(0, 1) does not permute the axes of float32[2,3,5]"),
        (Reshape((4, 7)), "float32[2,3,5] has 30 elements, the shape (4, 7) 28"),
        (Slice(1, 2, 4), "elements 2 to 4 of axis 1 are not in float32[2,3,5]"),
        (Slice(3, 0, 0), "elements 0 to 0 of axis 3 are not in float32[2,3,5]"),
        (Slice(1, 2, 1), "elements 2 to 1 of axis 1 are not in float32[2,3,5]"),
        (Pad(1, -1, 0), "-1 and 0 zeros do not fit around axis 1 of float32[2,3,5]"),
        (Take(2, 5), "element 5 of axis 2 is not in float32[2,3,5]"),
        (Take(0, -1), "element -1 of axis 0 is not in float32[2,3,5]"),
        (Place(4, 0, 1), "float32[2,3,5] cannot be element 0 of 1 on axis 4"),
        (Place(0, 2, 2), "float32[2,3,5] cannot be element 2 of 2 on axis 0"),
        (Flip((3,)), "axes (3,) are not in float32[2,3,5]"),
        (Deinterleave(1), "axis 1 of float32[2,3,5] has no pairs"),
        (Interleave(3), "axis 3 of float32[2,3,5] has no pairs"),
        (Reorder(1, (1, 3), (1, 0)), "axis 1 of float32[2,3,5] is not made of parts of 1, 3"),
        (Reorder(1, (1, 2), (1, 1)), "(1, 1) is no order of 2 parts"),
        (Deinterleave(0, 4), "axis 0 of float32[2,3,5] is not made of runs of 4 elements that have pairs"),
        (Multiply(0), "a multiplication by zero loses the weight"),
    ],
)
def test_an_operation_that_does_not_fit(op: Op, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        op.out_spec(TensorSpec((2, 3, 5), "float32"))
    assert str(refused.value) == message


# --- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in ("float32", "float64")])
@pytest.mark.parametrize("op", [Add(1), Multiply(2)])
def test_arithmetic_refuses_narrow_dtypes(op: Op, dtype: str) -> None:
    with pytest.raises(ValueError) as refused:
        op.out_spec(TensorSpec((3,), dtype))
    assert str(refused.value) == f"'{op}' on {dtype} would lose bits; cast to float32 first"


@given(specs(("float32", "float64")), seeds, st.sampled_from([Add(1.0), Add(-1.0), Multiply(2.0), Multiply(-0.25)]))
def test_laws_of_arithmetic(spec: TensorSpec, seed: int, op: Op) -> None:
    x = np.random.default_rng(seed).integers(-(2**20), 2**20, spec.shape).astype(spec.dtype)  # exact under all four
    y = op.apply(x)
    assert isinstance(y, np.ndarray)
    assert spec_of(y) == op.out_spec(spec) == spec
    assert same_bits(op.inverse(spec).apply(y) + 0, x)
    operation: Callable[[float, float], float] = operator.add if isinstance(op, Add) else operator.mul
    assert [operation(float(v), op.value) for v in x.ravel()] == y.ravel().tolist()


def test_arithmetic_stays_in_the_dtype_that_came_in() -> None:
    assert Add(1.0).apply(np.array([2.0**-24], np.float32)).tolist() == [1.0]
    assert Add(1.0).apply(np.array([2.0**-24], np.float64)).tolist() == [1 + 2.0**-24]


def test_texts_for_people() -> None:
    assert [str(op) for op in (Add(1.0), Add(-1.0), Multiply(0.5), Cast("bfloat16"), Permute((1, 0)), Take(0, 3))] == [
        "+ 1",
        "- 1",
        "x 0.5",
        "to bfloat16",
        "permute (1, 0)",
        "axis 0 [3]",
    ]


# --- casts ----------------------------------------------------------------------------------------------------------


@cache
def all_values(dtype: str) -> np.ndarray:
    """Every value of a dtype of at most 16 bits, in the dtype."""
    if dtype == "bool":
        return np.array([False, True])
    if dtype in NARROW_INTS:
        info = ml_dtypes.iinfo(numpy_dtype(dtype))
        return np.arange(info.min, int(info.max) + 1, dtype=np.int8).astype(numpy_dtype(dtype))
    bits = numpy_dtype(dtype).itemsize * 8
    return np.arange(2**bits, dtype=f"uint{bits}").view(numpy_dtype(dtype))


def in_float64(x: np.ndarray) -> np.ndarray:
    """Exact, for every dtype of at most 32 bits."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x.astype(np.float32).astype(np.float64) if x.dtype.isbuiltin != 1 else x.astype(np.float64)


SMALL = tuple(d for d in DTYPES if numpy_dtype(d).itemsize <= 2)
SMALL_FLOATS = tuple(d for d in SMALL if is_float(d) and "e8m0" not in d)


@cache
def representable(dtype: str) -> tuple[frozenset[tuple[float, bool]], bool, bool]:
    """The finite and infinite values (with the sign of zero) of a small dtype; whether it has NaN, and a negative zero."""
    values = in_float64(all_values(dtype))
    keys = {(float(v), bool(s)) for v, s in zip(values, np.signbit(values), strict=True) if not np.isnan(v)}
    return frozenset(keys), bool(np.isnan(values).any()), (0.0, True) in keys


def holds(target: str, source: str) -> bool:
    """Whether every value of the small dtype `source` is one of `target`: value by value."""
    values, nan, _ = representable(source)
    if target in SMALL:
        wanted, has_nan, _ = representable(target)
        if not is_float(source):  # an integer zero has no sign
            wanted |= {(0.0, False)} if (0.0, True) in wanted else set()
        return values <= wanted and (has_nan or not nan)
    if is_float(target) or target.startswith("complex"):
        return True  # float32 holds all 16-bit floats and integers
    info = ml_dtypes.iinfo(numpy_dtype(target))
    return not nan and all(
        math.isfinite(v) and v == int(v) and info.min <= v <= info.max and (v, s) != (0.0, True) for v, s in values
    )


@pytest.mark.parametrize("source", SMALL)
def test_widens_agrees_with_every_value(source: str) -> None:
    for target in DTYPES:
        assert widens(source, target) == holds(target, source), (source, target)


@pytest.mark.parametrize("source", SMALL)
def test_a_widening_cast_keeps_every_value(source: str) -> None:
    values = all_values(source)
    for target in DTYPES:
        if widens(source, target):
            there = Cast(target).apply(values)
            back = Cast(source).apply(there.real if target.startswith("complex") else there)
            a, b = in_float64(values), in_float64(back)
            np.testing.assert_array_equal(a, b, err_msg=f"{source} -> {target}")
            np.testing.assert_array_equal(np.signbit(a) & ~np.isnan(a), np.signbit(b) & ~np.isnan(b))


def test_widens_among_the_wide() -> None:
    assert widens("float32", "float64") and not widens("float64", "float32")
    assert widens("int32", "float64") and not widens("int32", "float32") and not widens("int64", "float64")
    assert widens("uint32", "int64") and not widens("uint64", "int64") and not widens("int8", "uint64")
    assert widens("complex64", "complex128") and not widens("complex128", "complex64")
    assert widens("float32", "complex64") and not widens("complex64", "float64") and not widens("float64", "complex64")


def nearest_even(x: np.ndarray, target: str) -> np.ndarray:
    """Rounding to nearest even by looking up the two neighbours in the table of all finite values; in float64."""
    table = all_values(target)
    as_float = in_float64(table)
    finite = np.isfinite(as_float) & ~((as_float == 0) & np.signbit(as_float))
    order = np.argsort(as_float[finite])
    values, bits = as_float[finite][order], table[finite][order].view(f"uint{table.itemsize * 8}")
    above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    middle = (low + high) / 2  # exact: one bit more than the values have
    up = (x > middle) | ((x == middle) & (bits[above] % 2 == 0))
    return np.where(up, high, low)


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("target", SMALL_FLOATS)
def test_casts_round_once_to_nearest_even(target: str, source: str) -> None:
    """On every value, every midpoint between two, their neighbours in the source's dtype, and random numbers."""
    values = np.unique(in_float64(all_values(target))[np.isfinite(in_float64(all_values(target)))])
    hard = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(source)
    limit = np.abs(values).max()
    random = np.random.default_rng(0).standard_normal(5000) * np.exp(np.random.default_rng(1).uniform(-12, 4, 5000))
    x = np.concatenate([hard, np.nextafter(hard, np.inf), np.nextafter(hard, -np.inf), random]).astype(source)
    x = x[np.abs(x) <= limit]
    out = Cast(target).apply(x)
    assert out.dtype == numpy_dtype(target)
    np.testing.assert_array_equal(in_float64(out), nearest_even(x.astype(np.float64), target))


def test_the_rounding_test_sees_a_second_rounding() -> None:
    """What float64 -> float32 -> bfloat16 gives is wrong by one unit, and the table knows."""
    x = np.array([1 + 2.0**-8 + 2.0**-40])
    twice = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert twice.tolist() == [1.0]
    assert nearest_even(x, "bfloat16").tolist() == in_float64(Cast("bfloat16").apply(x)).tolist() == [1 + 2.0**-7]


@pytest.mark.parametrize("target", [*SMALL_FLOATS, "float32"])
def test_a_finite_number_never_becomes_infinite(target: str) -> None:
    limit = float(ml_dtypes.finfo(numpy_dtype(target)).max)
    with pytest.raises(OverflowError) as refused:
        Cast(target).apply(np.array([1.0, 4 * limit, -4 * limit]))
    assert str(refused.value) == f"2 of 3 values do not fit {target}, {4 * limit} for example"
    assert float(Cast(target).apply(np.array([limit]))[0]) == limit
    with np.errstate(invalid="ignore"):
        passed = in_float64(Cast(target).apply(np.array([np.nan])))
    assert np.isnan(passed).all()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (1,), (2, 3)])
@pytest.mark.parametrize("source", ["float64", "float32", "bfloat16", "int4", "int64", "bool"])
@pytest.mark.parametrize("target", ["float32", "bfloat16", "float8_e4m3fn", "float64", "int8"])
def test_cast_keeps_the_shape(shape: tuple[int, ...], source: str, target: str) -> None:
    x = np.ones(shape, numpy_dtype(source))
    out = Cast(target).apply(x)
    assert spec_of(out) == Cast(target).out_spec(spec_of(x)) == TensorSpec(shape, target)
    assert (in_float64(out) == 1).all()
    assert Cast(target).inverse(spec_of(x)) == Cast(source)


INTS = tuple(d for d in DTYPES if d.startswith(("int", "uint")))


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations((*INTS, "bool"), 2)))
def test_integers_keep_their_value_or_are_refused(source: str, target: str) -> None:
    """Among others uint8 200 as int8, which wraps to -56 and comes back as 200."""

    def span(dtype: str) -> tuple[int, int]:
        info = None if dtype == "bool" else ml_dtypes.iinfo(numpy_dtype(dtype))
        return (0, 1) if info is None else (int(info.min), int(info.max))

    (low, high), (to_low, to_high) = span(source), span(target)
    for value in {
        low,
        high,
        0,
        1,
        *(v for v in (to_low, to_high, to_high + 1, to_low - 1, -1, 200) if low <= v <= high),
    }:
        x = np.array([value], dtype=numpy_dtype(source) if source not in NARROW_INTS else np.int8).astype(
            numpy_dtype(source)
        )
        assert int(x[0]) == value
        if to_low <= value <= to_high:
            assert int(Cast(target).apply(x)[0]) == value
        else:
            with pytest.raises(OverflowError, match=f"^1 of 1 values do not fit {target}, "):
                Cast(target).apply(x)


@pytest.mark.parametrize("value", [0.5, 300.0, -1.0, np.nan, np.inf])
def test_floats_become_integers_exactly_or_not_at_all(value: float) -> None:
    with pytest.raises(OverflowError, match=r"^1 of 2 values do not fit uint8"):
        Cast("uint8").apply(np.array([3.0, value], np.float32))
    assert Cast("uint8").apply(np.array([3.0, 255.0], np.float32)).tolist() == [3, 255]


@pytest.mark.parametrize("target", [d for d in DTYPES if not d.startswith("complex")])
def test_imaginary_parts_are_not_dropped(target: str) -> None:
    with pytest.raises(ValueError) as refused:
        Cast(target).out_spec(TensorSpec((2,), "complex64"))
    assert str(refused.value) == f"complex64 as {target} would lose the imaginary part"


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConvertError, match="unknown dtype: expected one of bool, .*, got 'float33'"):
        Cast("float33").out_spec(TensorSpec((), "float32"))


def test_cast_to_its_own_dtype_copies_nothing() -> None:
    x = np.ones(3, ml_dtypes.bfloat16)
    assert Cast("bfloat16").apply(x) is x
