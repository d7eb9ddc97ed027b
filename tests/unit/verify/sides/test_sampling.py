"""Which part of a value a recording keeps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.verify.sides.sampling import LEAST, Cost, Sample, _hash, allot, least, positions

shapes = st.lists(st.integers(1, 6), min_size=2, max_size=4).map(tuple)


def mask_of(shape: tuple[int, ...], seed: int, axes: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kept = tuple(size if rng.random() < 0.7 else 1 for size in shape[:axes])
    return rng.random(kept) < 0.6


def test_the_positions_never_change() -> None:
    """Recordings that were made with other versions rely on it."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of SplitMix64, seed 1234567
    assert _hash(3, 1234567).tolist() == published
    assert positions((4, 16, 32), None, 6, 0).tolist() == [2, 32, 33, 42, 53, 63]
    assert positions((4, 16, 32), None, 6, 1).tolist() == [20, 21, 25, 28, 61, 63]
    mask = np.ones((4, 16), bool)
    mask[1, :3] = mask[3, 5:9] = False
    assert positions((4, 16, 2, 32), mask, 4, 0).tolist() == [39, 105, 114, 127]


@given(shapes, st.integers(0, 9), st.integers(0, 4), st.integers(0, 2**70), st.integers(0, 200))
def test_only_what_counts_is_kept(shape: tuple[int, ...], mask_seed: int, axes: int, seed: int, count: int) -> None:
    mask = mask_of(shape, mask_seed, min(axes, len(shape)))
    whole = np.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape)
    counted = np.flatnonzero(whole.any(-1))
    chosen = positions(shape, mask, count, seed)
    assert len(chosen) == min(count, len(counted)) and set(chosen.tolist()) <= set(counted.tolist())
    assert (np.diff(chosen) > 0).all()
    fewest, total = least(shape, mask)
    assert total == len(counted) and min(total, LEAST) <= fewest <= total
    assert set(positions(shape, mask, fewest, seed).tolist()) <= set(positions(shape, mask, total, seed).tolist())


def test_edges_of_the_mask_and_the_last_position_come_first() -> None:
    mask = np.ones((3, 10), bool)
    mask[1, :4] = mask[2, 6:] = False
    for seed in range(20):  # batch rows are no neighbours; of the 8 heads one stands for each edge
        chosen = positions((3, 10, 8, 5), mask, 2, seed)
        places = {tuple(map(int, at[:2])) for at in zip(*np.unravel_index(chosen, (3, 10, 8)), strict=True)}
        assert places == {(1, 4), (2, 5)}
    assert least((3, 10, 8, 5), mask) == (2 + LEAST, 22 * 8)
    assert positions((3, 10, 8, 5), None, 1, 0).tolist() == [239]


@given(shapes, st.integers(0, 2**64), st.integers(1, 40))
def test_a_sample_knows_where_it_was_taken(shape: tuple[int, ...], seed: int, count: int) -> None:
    value = np.arange(math.prod(shape)).reshape(shape)
    sample = Sample(shape, positions(shape, None, count, seed))
    taken = sample.take(value)
    assert taken.shape == (min(count, math.prod(shape[:-1])), shape[-1])
    for at in np.ndindex(taken.shape):
        assert value[sample.index(at)] == taken[at]
    with pytest.raises(ValueError, match="expected shape"):
        sample.take(value[:-1])


costs = st.builds(
    lambda vector, a, b, c: Cost(vector, *sorted((a, b, c))),
    st.integers(1, 100),
    st.integers(1, 50),
    st.integers(1, 50),
    st.integers(1, 50),
)


@given(st.dictionaries(st.text(max_size=2), costs, max_size=6), st.integers(0, 20_000))
def test_the_budget_is_kept_and_used(costs: dict[str, Cost], budget: int) -> None:
    fewest = sum(min(c.vector * c.whole, c.vector * c.least) for c in costs.values())
    if fewest > budget:
        with pytest.raises(ValueError, match=str(fewest)):
            allot(costs, budget)
        return
    counts = allot(costs, budget)
    spent = sum(costs[name].vector * count for name, count in counts.items())
    assert spent <= budget
    for name, count in counts.items():
        assert count == costs[name].whole or costs[name].least <= count <= costs[name].counted
    for (
        name,
        count,
    ) in counts.items():  # no value could have one position more than its share without breaking the budget
        room = costs[name].vector * (count + 1)
        if count < costs[name].counted and all(costs[n].vector * c >= room for n, c in counts.items() if n != name):
            assert spent + costs[name].vector > budget
