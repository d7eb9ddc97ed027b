"""What every `Source` must do, as a test class: subclass it and give the fixtures `source` and `expected`."""

import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from convert import open_source
from convert.checkpoints import chunks
from convert.checkpoints.chunks import Box
from convert.checkpoints.digest import digest_leaf
from convert.checkpoints.encodings import zarr_chunks
from convert.checkpoints.source import Source, tree_order
from convert.core.tensor_spec import TensorSpec, dtype_name, numpy_dtype

_IMPORTS_SEEN: set[str] = set()


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether both have the same dtype, shape and bytes (NaNs and negative zeros included)."""
    return got.dtype == want.dtype and got.shape == want.shape and got.tobytes() == np.ascontiguousarray(want).tobytes()


class SourceContract:
    """Subclasses define `source` and `expected` (name -> array) with scope ``class``.

    Attributes:
        sorted_by_name: whether the leaves come as JAX sorts dicts; False where the order is that of the file.
        options: for `open_source`, beside the path.
    """

    sorted_by_name = True
    options: Mapping[str, object] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls) -> Source:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def expected(cls) -> Mapping[str, np.ndarray]:
        raise NotImplementedError

    def reopened(self, source: Source) -> Source:
        return open_source(source.display_path, **self.options)  # type: ignore[arg-type]

    def test_has_the_leaves_that_were_written(self, source: Source, expected: Mapping[str, np.ndarray]) -> None:
        got = {name: leaf.spec for name, leaf in source.leaves.items()}
        want = {
            name: TensorSpec(array.shape, dtype_name(array.dtype.newbyteorder("="))) for name, array in expected.items()
        }
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

    def test_pieces_are_the_array_in_c_order(
        self, source: Source, expected: Mapping[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Small ones, so that an array takes several; each chunk's come from front to back, as checksums take them."""
        monkeypatch.setattr(chunks, "PIECE", 24)
        monkeypatch.setattr(zarr_chunks, "SMALL", 0)  # nothing is so small that it is read in one
        several = 0
        for name, leaf in source.leaves.items():
            got = np.zeros(leaf.spec.shape, numpy_dtype(leaf.spec.dtype))
            for chunk in source.chunks(name):
                found = [(origin, np.array(values)) for origin, values in source.pieces(name, chunk)]
                several += len(found) > 1
                for origin, values in found:
                    assert values.nbytes <= max(24, values.itemsize)
                    got[Box(origin, values.shape).within((0,) * values.ndim)] = values
                in_order = [values.reshape(-1) for _, values in found]
                here = expected[name][chunk.within((0,) * len(leaf.spec.shape))]
                assert not found or same(np.concatenate(in_order), here.reshape(-1)), name
            assert same(got, expected[name]), name
        assert several or not any(array.nbytes > 100 for array in expected.values())

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

    def test_order_and_digest_are_the_same_each_time(self, source: Source) -> None:
        again = self.reopened(source)
        assert list(again.leaves) == list(source.leaves)
        assert again.format == source.format
        for name in source.leaves:
            assert digest_leaf(name, source.read(name)) == digest_leaf(name, again.read(name))
        if self.sorted_by_name:
            keys = [leaf.keys for leaf in source.leaves.values()]
            assert keys == sorted(keys, key=tree_order)

    def test_names_are_the_keys_joined(self, source: Source) -> None:
        for name, leaf in source.leaves.items():
            assert name.replace("\\/", "/") == "/".join(leaf.keys)

    def test_opening_and_reading_import_neither_jax_nor_torch(self, source: Source) -> None:
        """In a fresh interpreter, once per format."""
        if source.format in _IMPORTS_SEEN:
            return
        _IMPORTS_SEEN.add(source.format)
        code = (
            "import sys, pathlib, convert\n"
            f"source = convert.open_source({str(source.display_path)!r}, **{self.plain_options()!r})\n"
            "for name in source.leaves: source.read(name)\n"
            "print(len(source.leaves), sorted({'jax', 'jaxlib', 'flax', 'orbax', 'torch', 'keras', 'equinox', 'pickle5',"
            " 'tensorflow', 'transformers'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split(" ", 1) == [str(len(source.leaves)), "[]\n"], done.stdout

    def plain_options(self) -> dict[str, object]:
        return {name: str(value) if name == "skeleton" else value for name, value in self.options.items()}
