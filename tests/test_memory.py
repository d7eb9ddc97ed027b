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
from safetensors.numpy import load_file

from convert import PlanError
from convert.errors import CheckpointError
from convert.moving import used_leaves
from convert.planner import make_plan
from convert.sources import chunks
from convert.sources.budget import Budget, StoppedError
from convert.sources.chunks import PIECE, Box, Grid, Meter, Piece
from convert.streaming import execute
from memory_source import MemorySource, rule_file, run

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
            return chunks.in_one(chunk.origin, array.copy, array.nbytes, meter)
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
    first = budget.take(60, "a")
    entered: list[str] = []

    def other(name: str, nbytes: int) -> None:
        with budget.holding(nbytes):
            entered.append(name)

    small = threading.Thread(target=other, args=("small", 40))
    small.start()
    small.join(5)
    assert entered == ["small"]
    large = threading.Thread(target=other, args=("large", 1000))
    large.start()
    large.join(0.1)
    assert entered == ["small"] and budget.held == 60
    budget.take(500, "a")(500)  # it needs more to go on
    first(20)
    large.join(0.1)
    assert entered == ["small"]
    first(40)
    large.join(5)
    assert entered == ["small", "large"] and budget.held == 0


def test_a_thread_that_holds_something_does_not_wait_for_more() -> None:
    budget = Budget(10)
    with budget.holding(8), budget.holding(8) as less:
        less(3)
        assert budget.held == 13
    assert budget.held == 0


def test_who_waits_is_told_to_stop() -> None:
    budget = Budget(10)
    budget.take(8, "a")
    said: list[type[BaseException]] = []

    def other() -> None:
        try:
            budget.take(8, "b")
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


@pytest.mark.parametrize("most", [1, 6 << 20, 12 << 20])
@pytest.mark.parametrize("rows", [97, 700, 4000])
def test_a_small_budget_does_not_stop_seven_threads(
    rows: int, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaves that are gathered, of chunks that are read at once: each waits for room in two budgets."""
    monkeypatch.setattr("convert.moving.Budget", lambda: Budget(most))
    monkeypatch.setattr(chunks, "WHOLE", Budget(most))
    arrays = five()
    list(execute(make_plan(rule_file(NORM), InChunks(arrays, rows, at_once=True)), tmp_path / "m.safetensors", jobs=7))
    equal(NORM, arrays, tmp_path / "m.safetensors")
    assert chunks.WHOLE.held == 0


def test_threads_do_not_multiply_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = plain()  # 5 leaves of 5.3 MB
    monkeypatch.setattr(chunks, "WHOLE", Budget(1))
    one, seven = (peak(PLAIN, InChunks(arrays, at_once=True), tmp_path / "m.safetensors", jobs) for jobs in (1, 7))
    assert seven < one + 3_000_000, (one, seven)
    monkeypatch.setattr(chunks, "WHOLE", Budget(1 << 30))  # planted: a budget that never makes anybody wait
    assert peak(PLAIN, InChunks(arrays, at_once=True), tmp_path / "m.safetensors", 7) > one + 10_000_000
    equal(PLAIN, arrays, tmp_path / "m.safetensors")


@pytest.mark.parametrize("fault", ["value", "chunk"])
def test_an_error_gives_back_what_was_held(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while others wait for what will never be dealt with, and while the error is kept."""
    monkeypatch.setattr("convert.moving.Budget", lambda: Budget(1))
    monkeypatch.setattr(chunks, "WHOLE", Budget(1))
    arrays = five()
    arrays["c/w"][...] = 1e38

    class Broken(InChunks):
        def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
            if fault == "chunk" and name == "c/w" and chunk.origin[0]:
                raise CheckpointError("c/w is damaged")
            return super().pieces(name, chunk, meter)

    source = Broken(arrays if fault == "chunk" else {k: v for k, v in arrays.items() if k.endswith("w")}, 200, True)
    rules = rule_file(NORM if fault == "chunk" else PLAIN)
    plan = make_plan(rules, source, dtype=None if fault == "chunk" else "float16")
    with pytest.raises(CheckpointError if fault == "chunk" else PlanError) as kept:
        list(execute(plan, tmp_path / "m.safetensors", jobs=3))
    assert kept.value.__traceback__ is not None and chunks.WHOLE.held == 0
    assert not any(tmp_path.iterdir())


# ---- what needs no whole leaf

ROPE = "- einsum: ...D,DNH->...NH\n  from: '{q,k}/w'\n  rope: {H: PAIRS}\n  linear: '{q,k}'"


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
