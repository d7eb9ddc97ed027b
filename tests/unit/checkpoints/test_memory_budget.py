"""What is held whole: within a budget, in any number of threads, and no more of a leaf than its operations need."""

from __future__ import annotations

import faulthandler
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from convert import PlanError
from convert.checkpoints import chunks
from convert.checkpoints.chunks import PIECE, Box, Grid, Meter, Piece
from convert.checkpoints.encodings import zarr_chunks
from convert.checkpoints.memory_budget import Budget, StoppedError
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.ops import Op
from convert.core.tensor_spec import numpy_dtype
from convert.core.weight_norm_ops import Features, Operand, SpectralNorm, Standardize, WeightNorm
from convert.planning.planner import make_plan
from convert.writing.execute import execute
from convert.writing.transfer import used_leaves
from support.marks import slow_but
from support.memory_source import MemorySource, rule_file, run
from support.weight_matrix import back, matrix

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _no_deadlock() -> Iterator[None]:
    """Threads that wait for each other would keep the process for ever: it ends, and says where they stand."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


class InChunks(MemorySource):
    """Leaves in chunks of some rows each. Counts what is read whole; `at_once` chunks can only be read so."""

    def __init__(self, arrays: dict[str, np.ndarray], rows: int = 1 << 30, at_once: bool = False) -> None:
        super().__init__(arrays)
        self.rows, self.at_once = rows, at_once
        self.whole: Counter[str] = Counter()
        self.pieced: Counter[str] = Counter()

    def read(self, name: str) -> np.ndarray:
        self.whole[name] += 1
        return super().read(name)

    def chunks(self, name: str) -> Grid:
        shape = self.arrays[name].shape
        return Grid(shape, (min(self.rows, shape[0]), *shape[1:]) if shape else ())

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        self.pieced[name] += 1
        array = self.arrays[name][chunk.within((0,) * self.arrays[name].ndim)]
        if self.at_once:
            return chunks.read_at_once(chunk.origin, array.copy, array.nbytes, meter)
        return ((origin, values.copy()) for origin, values in chunks.cut(chunk.origin, array))


def peak(rules: str, source: MemorySource, out: Path, jobs: int) -> int:
    """Bytes that a conversion takes, the mapped output and the checkpoint apart."""
    plan = make_plan(rule_file(rules), source)
    tracemalloc.start()
    try:
        list(execute(plan, out, jobs=jobs, overwrite=True))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def equal(rules: str, arrays: dict[str, np.ndarray], out: Path) -> None:
    """What was written is, bit for bit, what each part's operations make of its whole leaf."""
    want = run(make_plan(rule_file(rules), MemorySource(arrays)))
    got = load_file(out)
    assert got.keys() == want.keys()
    for name, values in want.items():
        assert got[name].tobytes() == np.ascontiguousarray(values).tobytes(), name


# ---- the budget


def test_who_exceeds_the_budget_waits() -> None:
    budget = Budget(100)
    first = budget.acquire(60, "a")
    entered: list[str] = []

    def other(name: str, nbytes: int) -> None:
        with budget.reserve(nbytes):
            entered.append(name)

    small = threading.Thread(target=other, args=("small", 40))
    small.start()
    small.join(5)
    assert entered == ["small"]
    large = threading.Thread(target=other, args=("large", 1000))
    large.start()
    large.join(0.1)
    assert entered == ["small"] and budget.in_use == 60
    budget.acquire(500, "a")(500)  # it needs more to go on
    first(20)
    large.join(0.1)
    assert entered == ["small"]
    first(40)
    large.join(5)
    assert entered == ["small", "large"] and budget.in_use == 0


def test_a_thread_that_holds_something_does_not_wait_for_more() -> None:
    budget = Budget(10)
    with budget.reserve(8), budget.reserve(8) as less:
        less(3)
        assert budget.in_use == 13
    assert budget.in_use == 0


def test_who_waits_is_told_to_stop() -> None:
    budget = Budget(10)
    budget.acquire(8, "a")
    said: list[type[BaseException]] = []

    def other() -> None:
        try:
            budget.acquire(8, "b")
        except StoppedError as error:
            said.append(type(error))

    waiting = threading.Thread(target=other)
    waiting.start()
    budget.stop()
    waiting.join(5)
    assert said == [StoppedError]


NORM = "- einsum: ...D,DE->...E\n  from: '{a,b,c,d,e}/w'\n  weight_norm: '{a,b,c,d,e}/s'\n  linear: '{a,b,c,d,e}'"
PLAIN = "- einsum: ...D,DE->...E\n  from: '{a,b,c,d,e}/w'\n  linear: '{a,b,c,d,e}'"


def five() -> dict[str, np.ndarray]:
    shapes = {"w": (1300, 1024), "s": (1024,)}
    return {f"{m}/{n}": RNG.standard_normal(shape).astype(np.float32) for m in "abcde" for n, shape in shapes.items()}


def plain() -> dict[str, np.ndarray]:
    return {name: values for name, values in five().items() if name.endswith("w")}


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 6 << 20, 12 << 20])
@pytest.mark.parametrize("rows", slow_but([700], [97, 700, 4000]))
def test_a_small_budget_does_not_stop_seven_threads(
    rows: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves that are gathered, of chunks that are read at once: each waits for room in two budgets."""
    monkeypatch.setattr("convert.writing.transfer.Budget", lambda: Budget(most))
    monkeypatch.setattr(chunks, "AT_ONCE_BUDGET", Budget(most))
    arrays = five()
    list(execute(make_plan(rule_file(NORM), InChunks(arrays, rows, at_once=True)), tmp_path / "m.safetensors", jobs=7))
    equal(NORM, arrays, tmp_path / "m.safetensors")
    assert chunks.AT_ONCE_BUDGET.in_use == 0


@pytest.mark.slow
def test_threads_do_not_multiply_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = plain()  # 5 leaves of 5.3 MB
    monkeypatch.setattr(chunks, "AT_ONCE_BUDGET", Budget(1))
    one, seven = (peak(PLAIN, InChunks(arrays, at_once=True), tmp_path / "m.safetensors", jobs) for jobs in (1, 7))
    assert seven < one + 3_000_000, (one, seven)
    monkeypatch.setattr(chunks, "AT_ONCE_BUDGET", Budget(1 << 30))  # planted: a budget that never makes anybody wait
    assert peak(PLAIN, InChunks(arrays, at_once=True), tmp_path / "m.safetensors", 7) > one + 10_000_000
    equal(PLAIN, arrays, tmp_path / "m.safetensors")


@pytest.mark.parametrize("fault", ["value", "chunk"])
def test_an_error_gives_back_what_was_held(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while others wait for what will never be dealt with, and while the error is kept."""
    monkeypatch.setattr("convert.writing.transfer.Budget", lambda: Budget(1))
    monkeypatch.setattr(chunks, "AT_ONCE_BUDGET", Budget(1))
    arrays = five()
    arrays["c/w"][...] = 1e38

    class Broken(InChunks):
        def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
            if fault == "chunk" and name == "c/w" and chunk.origin[0]:
                raise CheckpointError(Finding("checkpoint-corrupt", "c/w is damaged"))
            return super().pieces(name, chunk, meter)

    source = Broken(arrays if fault == "chunk" else {k: v for k, v in arrays.items() if k.endswith("w")}, 200, True)
    rules = rule_file(NORM if fault == "chunk" else PLAIN)
    plan = make_plan(rules, source, dtype=None if fault == "chunk" else "float16")
    with pytest.raises(CheckpointError if fault == "chunk" else PlanError) as kept:
        list(execute(plan, tmp_path / "m.safetensors", jobs=3))
    assert kept.value.__traceback__ is not None and chunks.AT_ONCE_BUDGET.in_use == 0
    assert not any(tmp_path.iterdir())


# ---- what needs no whole leaf

ROPE = "- einsum: ...D,DNH->...NH\n  from: '{q,k}/w'\n  rope: {H: PAIRS}\n  linear: '{q,k}'"


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [None, 0, 1])
def test_rope_goes_straight_to_its_place(stacked: int | None, tmp_path: Path) -> None:
    shape = [260, 3, 1024] if stacked is None else [260, 3, 256]
    rules = ROPE.replace("PAIRS", "interleaved")
    if stacked is not None:
        shape.insert(stacked, 5)
        rules = rules.replace("linear: '{q,k}'", f"stacked: {{i: {stacked}}}\n  linear: '{{q,k}}.{{i}}'")
    shape[0] *= 6  # 19 MB, and 24
    arrays = {f"{m}/w": RNG.standard_normal(shape, np.float32) for m in "qk"}
    took = peak(rules, InChunks(arrays, 50), tmp_path / "m.safetensors", 1)
    assert took < 4 * PIECE < arrays["q/w"].nbytes, f"{took:,} bytes"
    equal(rules, arrays, tmp_path / "m.safetensors")


def test_a_stacked_operand_is_read_once_for_a_leaf(tmp_path: Path) -> None:
    arrays = {"w": RNG.standard_normal((20, 7, 5)), "s": RNG.standard_normal((20, 5))}
    rules = "- einsum: ...D,DE->...E\n  from: w\n  weight_norm: s\n  stacked: {i: 0}\n  linear: 'l.{i}'"
    source = InChunks(arrays, 3)
    plan = make_plan(rule_file(rules), source)
    assert len(plan.steps) == 20 and {*used_leaves(plan)} == {"w", "s"}
    list(execute(plan, tmp_path / "m.safetensors", jobs=3))
    assert source.whole == {"s": 1} and source.pieced == {"w": 7, "s": 7}  # the latter for the checksum
    equal(rules, arrays, tmp_path / "m.safetensors")


# ---- what is computed, in blocks


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_weight_norm_in_blocks_has_the_same_bits(data: st.DataObject) -> None:
    """Against the whole weight in one, however it lies in memory and whichever axes are features."""
    rank = data.draw(st.integers(1, 4))
    inner = tuple(data.draw(st.sampled_from([1, 2, 3, 8, 9, 31])) for _ in range(rank))
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, rank - 1)))))
    order = data.draw(st.permutations(range(rank)))
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    rng, contiguous = np.random.default_rng(data.draw(st.integers(0, 99))), data.draw(st.booleans())
    # All is drawn by now: Hypothesis fails a test whose draws take long, and numbers made between them would count.
    stored = rng.standard_normal([2 * inner[k] for k in order]).astype(dtype)
    stored = stored[tuple(slice(inner[k]) for k in order)]  # with gaps
    if contiguous:
        stored = np.ascontiguousarray(stored)
    x = stored.transpose([order.index(k) for k in range(rank)])
    of = Features(inner, axes)
    scale = rng.standard_normal(of.count)
    norm = WeightNorm(Operand("s", (), of.count, lambda _: scale), 1e-12, of)

    wide = matrix(of, x.astype(np.float64))
    length = np.sqrt(np.sum(np.square(wide), 1, keepdims=True) + 1e-12)
    want = back(of, (wide / length * scale.reshape(-1, 1)).astype(x.dtype), x.shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convert.core.weight_norm_ops.BLOCK", data.draw(st.integers(1, 300)))
        got, given_up = norm.apply(x), norm.overwrite(x)
    for each in (got, given_up):
        assert each.shape == want.shape and each.dtype == want.dtype and each.tobytes() == want.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 1 << 18])
def test_a_long_row_has_the_same_bits_in_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the block of NumPy's pairwise sums, and beyond its buffers; in both orders of the axes."""
    monkeypatch.setattr("convert.core.weight_norm_ops.BLOCK", block)
    for shape, axes in (((71, 20_001), (0,)), ((20_001, 71), (1,)), ((7, 30, 9_001), (1,)), ((9_001, 7, 30), (2, 1))):
        x = RNG.standard_normal(shape)
        of = Features(shape, axes)
        norm = WeightNorm(Operand("s", (), of.count, lambda _, n=of.count: np.ones(n)), 0.0, of)
        wide = matrix(of, x.astype(np.float64))
        want = back(of, wide / np.sqrt(np.sum(np.square(wide), 1, keepdims=True)), shape)
        assert norm.apply(x).tobytes() == want.tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_folds_of_a_matrix_in_blocks(data: st.DataObject) -> None:
    """Standardised weights and spectral norms, in memory of their own and in that of the weight."""
    shape = tuple(data.draw(st.sampled_from([2, 3, 8, 31])) for _ in range(data.draw(st.integers(2, 4))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.standard_normal(shape)
    of = Features(shape, (axis,))
    rows = matrix(of, x)
    u, v = rng.standard_normal(of.count), rng.standard_normal(of.rest)
    kind = data.draw(st.sampled_from(["standardised", "a step", "stored"]))
    if kind == "standardised":
        fold: Op = Standardize(axis, 0.1, inside := data.draw(st.booleans()))
        variance = rows.var(1, keepdims=True)
        want = (rows - rows.mean(1, keepdims=True)) / (np.sqrt(variance + 0.1) if inside else np.sqrt(variance) + 0.1)
    else:
        operands = [Operand(name, (), n.size, lambda _, n=n: n) for name, n in (("u", u), ("v", v))]
        fold = SpectralNorm(operands[0], 0.1, of, *((1,) if kind == "a step" else (0, operands[1])))
        if kind == "a step":
            v = u @ rows
            v /= np.sqrt(v @ v + 0.1)
            u = rows @ v
            u /= np.sqrt(u @ u + 0.1)
        want = rows / (u @ rows @ v)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convert.core.weight_norm_ops.BLOCK", data.draw(st.integers(1, 300)))
        for got in (fold.apply(x), given_up := fold.overwrite(x)):
            np.testing.assert_allclose(got, back(of, want, shape), rtol=1e-9)
    assert given_up is x


DENSE = "- einsum: ...D,DE->...E\n  from: w\n  {}\n  linear: a"
CONV = "- dimension_numbers: NHWC,HWIO->NHWC\n  axes: PQIO\n  from: w\n  {}\n  conv: a"
FOLDS = {
    "weight norm": (DENSE.format("weight_norm: s"), {"w": (5000, 1024), "s": (1024,)}),
    "spectral norm": (DENSE.format("spectral_norm: u"), {"w": (5000, 1024), "u": (1, 1024)}),
    "standardised": (CONV.format("weight_standardization: (w - mean) / (std + 0.1)"), {"w": (5, 5, 200, 1024)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fold", FOLDS)
def test_a_fold_takes_the_leaf_alone_in_float32(fold: str, dtype: str, tmp_path: Path) -> None:
    """It is cast as it comes, and back as it goes."""
    rules, shapes = FOLDS[fold]
    arrays = {name: RNG.standard_normal(shape).astype(numpy_dtype(dtype)) for name, shape in shapes.items()}
    took = peak(rules, InChunks(arrays, 700), tmp_path / "m.safetensors", 1)
    assert took < 4 * arrays["w"].size + 5 * PIECE, f"{took:,} bytes"
    equal(rules, arrays, tmp_path / "m.safetensors")


def test_a_value_beyond_the_dtype_of_what_is_gathered_is_named(tmp_path: Path) -> None:
    """Before the fold, where the leaf is cast to what it is computed in, and after it."""
    rules, shapes = FOLDS["weight norm"]
    arrays: dict[str, np.ndarray] = {name: np.ones(shape) for name, shape in shapes.items()}
    arrays["s"][3] = 1e300
    for dtype in ("float32", "float16"):
        plan = make_plan(rule_file(rules), InChunks(arrays, 700), dtype=dtype)
        with pytest.raises(PlanError, match=r"a\.weight: from w: .*; keep a wider dtype"):
            list(execute(plan, tmp_path / "m.safetensors", jobs=1))


def test_factors_of_a_product_are_held_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, of which only so many threads have theirs at a time."""
    budget, held = Budget(6 << 20), []
    monkeypatch.setattr("convert.planning.low_rank_source.AT_ONCE_BUDGET", budget)

    class Watched(InChunks):
        def read(self, name: str) -> np.ndarray:
            held.append(budget.in_use)
            return super().read(name)

    rules = "- einsum: ...D,DR,RE->...E\n  from: '{a,b,c,d}/a'\n  times: '{a,b,c,d}/b'\n  linear: '{a,b,c,d}'"
    shapes = {"a": (300_000, 3), "b": (3, 2)}
    arrays = {f"{m}/{n}": RNG.standard_normal(s).astype(np.float32) for m in "abcd" for n, s in shapes.items()}
    list(execute(make_plan(rule_file(rules), Watched(arrays)), tmp_path / "m.safetensors", jobs=4))
    one = sum(arrays[f"a/{n}"].nbytes for n in "ab")
    assert set(held) == {one} and budget.in_use == 0


def test_a_decoder_s_window_is_held_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame whose window is as large as its content: zstd needs all that it has decoded."""
    content = np.arange(3 << 20, dtype=np.uint32).tobytes()
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=24)
    value = zstandard.ZstdCompressor(compression_params=wide).compress(content)
    budget = Budget()
    monkeypatch.setattr("convert.checkpoints.encodings.zarr_chunks.AT_ONCE_BUDGET", budget)
    with zarr_chunks.decoding(value, True) as fill:
        buffer = bytearray(len(content))
        fill(memoryview(buffer))
        assert buffer == content and budget.in_use >= len(content)
    assert budget.in_use == 0
    with zarr_chunks.decoding(zstandard.ZstdCompressor(level=1).compress(content), True) as fill:
        fill(memoryview(buffer))
        assert budget.in_use == 0


LORA = """
- einsum: ...D,DE->...E
  from: q/w
  plus: {einsum: "...D,DR,RE->...E", from: q/a, times: q/b, scale: 0.3}
  linear: q
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [300, 1 << 30])
@pytest.mark.parametrize("columns", [1024, 400])
def test_a_pair_is_merged_piece_by_piece(rows: int, columns: int, tmp_path: Path) -> None:
    """In the order of the whole, so that the checksum is the same; chunks that are in another order are gathered first."""

    class Tiled(InChunks):
        def chunks(self, name: str) -> Grid:
            shape = self.arrays[name].shape
            return Grid(shape, (min(self.rows, shape[0]), min(columns, shape[1])))

    arrays = {
        "q/w": RNG.standard_normal((5000, 1024)).astype(np.float32),
        "q/a": RNG.standard_normal((5000, 3)).astype(np.float32),
        "q/b": RNG.standard_normal((3, 1024)).astype(np.float32),
    }
    took = peak(LORA, source := Tiled(arrays, rows), tmp_path / "m.safetensors", 1)
    in_order = columns == 1024
    assert source.whole == {"q/a": 1, "q/b": 1, **({} if in_order else {"q/w": 1})}
    assert took < 6 * PIECE, f"{took:,} bytes"  # of 20 MB; what is gathered is not copied here
    a, b = arrays["q/a"].astype(np.float64), arrays["q/b"].astype(np.float64)
    want = np.zeros((5000, 1024))
    for r in range(3):
        want += a[:, r, None] * b[r]
    want *= 0.3
    want += arrays["q/w"].astype(np.float64)
    assert load_file(tmp_path / "m.safetensors")["q.weight"].tobytes() == want.astype(np.float32).T.tobytes()
    whole = MemorySource(arrays)
    list(execute(make_plan(rule_file(LORA), whole), tmp_path / "whole.safetensors", jobs=2))
    assert (tmp_path / "m.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_grids_in_order() -> None:
    for shape, chunk in (((6, 4, 5), (1, 2, 5)), ((6, 4, 5), (3, 4, 5)), ((6, 4), (1, 1)), ((), ()), ((1, 6, 4), (1, 3, 4)), ((6, 4), (3, 2)), ((6, 4), (6, 3)), ((2, 6, 4), (2, 3, 4))):  # fmt: skip
        numbers = np.arange(int(np.prod(shape))).reshape(shape)
        grid = Grid(shape, chunk)
        flat = np.concatenate([numbers[box.within((0,) * len(shape))].ravel() for box in grid])
        assert grid.in_order == bool((flat == numbers.ravel()).all()), (shape, chunk)
