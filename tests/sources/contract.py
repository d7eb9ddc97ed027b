"""What every `Source` must do, as a test class: subclass it and give the fixtures `source` and `expected`."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from convert.sources.base import Source
from convert.spec import TensorSpec, dtype_name


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether both have the same dtype, shape and bytes (NaNs and negative zeros included)."""
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == np.ascontiguousarray(want).tobytes()


class SourceContract:
    """Subclasses define `source` and `expected` (name -> array) with scope ``class``."""

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls) -> Source:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        raise NotImplementedError

    def test_has_the_leaves_that_were_written(self, source: Source, expected: Mapping[str, np.ndarray]) -> None:
        got = {name: leaf.spec for name, leaf in source.leaves.items()}
        want = {name: TensorSpec(array.shape, dtype_name(array.dtype)) for name, array in expected.items()}
        assert got == want, f"not the same: {[name for name in got | want if got.get(name) != want.get(name)]}"

    def test_reads_every_leaf_bit_for_bit(self, source: Source, expected: Mapping[str, np.ndarray]) -> None:
        wrong = [name for name in source.leaves if not same(source.read(name), expected[name])]
        assert not wrong, wrong

    def test_reads_in_c_order_into_memory_of_its_own(self, source: Source) -> None:
        for name in source.leaves:
            array = source.read(name)
            assert isinstance(array, np.ndarray)
            assert array.flags.c_contiguous
            assert not np.shares_memory(array, source.read(name))

    def test_reads_from_several_threads(self, source: Source, expected: Mapping[str, np.ndarray]) -> None:
        names = list(source.leaves) * 4
        with ThreadPoolExecutor(8) as pool:
            got = pool.map(source.read, names)
            wrong = {name for name, array in zip(names, got, strict=True) if not same(array, expected[name])}
        assert not wrong, wrong

    def test_counts_its_bytes(self, source: Source, expected: Mapping[str, np.ndarray]) -> None:
        assert source.nbytes == sum(array.nbytes for array in expected.values())

    def test_does_not_know_other_leaves(self, source: Source) -> None:
        with pytest.raises(KeyError):
            source.read("no/such/leaf")
