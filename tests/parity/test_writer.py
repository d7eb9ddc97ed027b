"""What the writer writes: layouts, bytes, metadata, index. How it gets there: test_atomic_output.py."""

import ctypes
import json
import mmap
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.core.errors import OutputError
from convert.core.safetensors_header import read_header
from convert.core.tensor_spec import SAFETENSORS_TAGS, TensorSpec, numpy_dtype
from convert.writing.file_layout import Layout, OutTensor, lay_out
from convert.writing.writer import Writer

WRITABLE = [name for name, tag in SAFETENSORS_TAGS.items() if tag is not None]


def specs_of(arrays: Mapping[str, np.ndarray]) -> list[OutTensor]:
    return [OutTensor(name, TensorSpec(array.shape, array.dtype.name)) for name, array in arrays.items()]


def write(out: Path, arrays: Mapping[str, np.ndarray], *, max_shard_bytes: int | None = None, **options: Any) -> Layout:
    tensors = specs_of(arrays)
    single = out.name if out.suffix == ".safetensors" else None
    layout = lay_out(tensors, single=single, max_shard_bytes=max_shard_bytes)
    with Writer(out, layout, tensors, **options) as writer:
        for name, array in arrays.items():
            writer.region(name)[...] = array
        writer.commit()
    return layout


def random_array(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    return rng.integers(0, 2, shape).astype(numpy_dtype(dtype)) if shape else np.array(1, numpy_dtype(dtype))


def to_torch(array: np.ndarray) -> torch.Tensor:
    dtype = getattr(torch, array.dtype.name)
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.tobytes()), dtype=dtype).reshape(array.shape)


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"layers.{dtype}.{i}": random_array(rng, shape, dtype)
        for dtype in WRITABLE
        for i, shape in enumerate([(3, 5), (), (0, 2), (7,)])
    }


# --- layout ---------------------------------------------------------------------------------------------------------


def tensors(*sizes: int) -> list[OutTensor]:
    return [OutTensor(f"t{i}", TensorSpec((size,), "uint8")) for i, size in enumerate(sizes)]


def files(layout: Layout) -> dict[str, list[str]]:
    return {file: [name for name, place in layout.placements.items() if place.file == file] for file in layout.files}


def test_one_file_without_a_limit_or_below_it() -> None:
    for limit in (None, 30):
        layout = lay_out(tensors(10, 20), max_shard_bytes=limit)
        assert layout.files == ("model.safetensors",)
        assert layout.index is None
        assert lay_out(tensors(10, 20), single="x.safetensors", max_shard_bytes=limit).files == ("x.safetensors",)


def test_shards_are_filled_in_order_and_a_large_tensor_gets_its_own() -> None:
    layout = lay_out(tensors(6, 6, 2, 60, 6, 2, 2), max_shard_bytes=10)
    assert files(layout) == {
        "model-00001-of-00004.safetensors": ["t0"],
        "model-00002-of-00004.safetensors": ["t3"],
        "model-00003-of-00004.safetensors": ["t1", "t2"],
        "model-00004-of-00004.safetensors": ["t4", "t5", "t6"],
    }
    assert layout.index == "model.safetensors.index.json"


def test_a_single_tensor_above_the_limit_needs_no_index() -> None:
    layout = lay_out(tensors(60), max_shard_bytes=10)
    assert (layout.files, layout.index) == (("model.safetensors",), None)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 40))
def test_shards_are_those_of_huggingface_hub(sizes: list[int], limit: int) -> None:
    expected = huggingface_hub.split_state_dict_into_shards_factory(
        {tensor.name: tensor.spec.nbytes for tensor in tensors(*sizes)},
        get_storage_size=lambda nbytes: nbytes,
        get_storage_id=lambda nbytes: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    layout = lay_out(tensors(*sizes), max_shard_bytes=limit)
    assert {name: place.file for name, place in layout.placements.items()} == expected.tensor_to_filename
    assert (layout.index is not None) == expected.is_sharded


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
            lambda name: name != "__metadata__"
        ),
        st.builds(TensorSpec, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(WRITABLE)),
        min_size=1,
        max_size=12,
    ),
    st.one_of(st.none(), st.integers(1, 300)),
    st.randoms(use_true_random=False),
)
def test_layouts_cover_their_files_without_gaps_or_overlaps(
    specs: dict[str, TensorSpec], limit: int | None, random: Any
) -> None:
    out = [OutTensor(name, spec) for name, spec in specs.items()]
    layout = lay_out(out, max_shard_bytes=limit)
    assert layout.placements.keys() == specs.keys()
    for file, names in files(layout).items():
        at = 0
        for name in names:
            place, spec = layout.placements[name], specs[name]
            assert (place.start, place.stop) == (at, at + spec.nbytes)
            assert at % numpy_dtype(spec.dtype).itemsize == 0
            at = place.stop
        if limit is not None and len(layout.files) > 1 and len(names) > 1:
            assert at <= limit, file
    if limit is None:
        random.shuffle(out)
        assert lay_out(out) == layout


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "^the plan has no tensors; add rules"),
        ([OutTensor("", TensorSpec((), "int8"))], "^'' is not a valid tensor name"),
        ([OutTensor("__metadata__", TensorSpec((), "int8"))], "^'__metadata__' is not a valid tensor name"),
        (tensors(1) * 2, "^t0: two tensors have this name"),
        (
            [OutTensor("w", TensorSpec((), "int4"))],
            "^w: the dtype cannot be stored in a safetensors file: .* got int4; cast the tensor",
        ),
    ],
)
def test_bad_tensors(bad: list[OutTensor], message: str) -> None:
    with pytest.raises(OutputError, match=message):
        lay_out(bad)


def test_one_file_cannot_be_split() -> None:
    with pytest.raises(
        OutputError, match=r"^x\.safetensors: expected at most 1,500 bytes in one file, got 2,000; give a directory"
    ):
        lay_out(tensors(1000, 1000), single="x.safetensors", max_shard_bytes=1500)
    with pytest.raises(OutputError, match="expected a shard size of at least 1 byte, got 0"):
        lay_out(tensors(1), max_shard_bytes=0)


# --- contents -------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_safetensors_own_writer(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    # numpy's save_file knows no ml_dtypes, torch's knows them all.
    expected = safetensors.torch.save({name: to_torch(array) for name, array in arrays.items()}, {"format": "pt"})
    write(tmp_path / "x.safetensors", arrays)
    assert (tmp_path / "x.safetensors").read_bytes() == expected


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        st.sampled_from(["float32", "int8", "bool"]),
        min_size=1,
    )
)
def test_bytes_are_those_of_safetensors_own_writer_for_any_names(names: dict[str, str]) -> None:
    arrays = {name: np.ones((len(name),), dtype) for name, dtype in names.items() if name != "__metadata__"}
    if not arrays:
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder, "x.safetensors"), arrays)
        assert Path(folder, "x.safetensors").read_bytes() == safetensors.numpy.save(arrays, metadata={"format": "pt"})


def test_metadata_equals_what_safetensors_reads_and_is_sorted(tmp_path: Path) -> None:
    metadata = {"z": "1", "a": 'quote " newline \n é \x01', "format": "np"}
    write(tmp_path / "x.safetensors", {"a": np.zeros(1, np.float32)}, metadata=metadata)
    with safetensors.safe_open(tmp_path / "x.safetensors", framework="np") as opened:
        assert opened.metadata() == metadata
    assert list(read_header(tmp_path / "x.safetensors")[0]) == ["a", "format", "z"]


def test_reads_back_with_numpy_and_torch(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    write(tmp_path / "x.safetensors", arrays)
    in_torch = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert in_torch.keys() == arrays.keys()
    for name, array in arrays.items():
        assert tuple(in_torch[name].shape) == array.shape
        assert bytes(in_torch[name].untyped_storage()) == array.tobytes(), name
    plain = {name: array for name, array in arrays.items() if not hasattr(ml_dtypes, array.dtype.name)}
    write(tmp_path / "plain.safetensors", plain)
    in_numpy = safetensors.numpy.load_file(tmp_path / "plain.safetensors")
    for name, array in plain.items():
        assert in_numpy[name].dtype == array.dtype
        np.testing.assert_array_equal(in_numpy[name], array, strict=True)


def test_directory_with_shards_and_index(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    out = tmp_path / "model"
    layout = write(out, arrays, max_shard_bytes=400, extra_files={"config.json": b"{}"}, metadata={"tool": "x"})
    assert len(layout.files) > 2
    assert sorted(entry.name for entry in out.iterdir()) == sorted(
        [*layout.files, "config.json", "model.safetensors.index.json"]
    )
    text = (out / "model.safetensors.index.json").read_text()
    index = json.loads(text)
    assert text == json.dumps(index, indent=2, sort_keys=True) + "\n"
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in arrays.values())}
    assert index["weight_map"].keys() == arrays.keys()
    for name, file in index["weight_map"].items():
        metadata, entries = read_header(out / file)
        assert metadata == {"format": "pt", "tool": "x"}
        assert (out / file).read_bytes()[entries[name].start : entries[name].stop] == arrays[name].tobytes()


def test_huggingface_loads_a_sharded_directory_strictly(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    arrays = {name: np.random.default_rng(1).random(p.shape, np.float32) for name, p in module.state_dict().items()}
    write(tmp_path / "model", arrays, max_shard_bytes=64)
    huggingface_hub.load_torch_model(module, tmp_path / "model", strict=True, safe=True)
    for name, value in module.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), arrays[name])


def test_transformers_loads_a_sharded_directory(tmp_path: Path) -> None:
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = GemmaForCausalLM(config)
    arrays = {name: p.numpy() for name, p in model.state_dict().items() if name != "lm_head.weight"}
    write(
        tmp_path / "model", arrays, max_shard_bytes=500, extra_files={"config.json": config.to_json_string().encode()}
    )
    loaded, info = GemmaForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_same_bytes_from_many_threads_in_any_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    arrays = {f"t{i}": rng.random(int(rng.integers(1, 5000))).astype(np.float32) for i in range(60)}
    write(tmp_path / "one", arrays, max_shard_bytes=50_000)
    outs = specs_of(arrays)
    layout = lay_out(outs, max_shard_bytes=50_000)
    names = list(arrays)
    for seed in range(3):
        np.random.default_rng(seed).shuffle(names)

        def fill(writer: Writer, mine: list[str]) -> None:
            for name in mine:
                writer.region(name)[...] = arrays[name]
                writer.done(name)

        with Writer(tmp_path / f"many{seed}", layout, outs) as writer:
            threads = [threading.Thread(target=fill, args=(writer, names[i::8])) for i in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            writer.commit()
        for entry in (tmp_path / "one").iterdir():
            assert entry.read_bytes() == (tmp_path / f"many{seed}" / entry.name).read_bytes()


def test_regions_are_aligned_writable_views_of_zeros(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    outs = specs_of(arrays)
    with Writer(tmp_path / "x.safetensors", lay_out(outs, single="x.safetensors"), outs) as writer:
        for out in outs:
            region = writer.region(out.name)
            assert (region.shape, region.dtype.name) == (out.spec.shape, out.spec.dtype)
            assert region.flags.writeable and region.flags.aligned and region.flags.c_contiguous
            assert not region.tobytes().strip(b"\0")
        with pytest.raises(KeyError):
            writer.region("nothing")


def test_pages_of_done_tensors_leave_the_process(tmp_path: Path) -> None:
    outs = [OutTensor(f"t{i}", TensorSpec((8 << 20,), "uint8")) for i in range(8)]
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc")

    def shared() -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssFile"))

    with Writer(tmp_path / "x.safetensors", lay_out(outs, single="x.safetensors"), outs) as writer:
        before = peak = shared()
        for out in outs:
            writer.region(out.name)[...] = 7
            peak = max(peak, shared())
            writer.done(out.name)
        writer.commit()
    assert peak - before < 20 << 10  # kB: two tensors, of eight
    assert (tmp_path / "x.safetensors").read_bytes()[-(64 << 20) :] == b"\7" * (64 << 20)


@pytest.mark.parametrize("known", [True, False])
def test_the_system_is_asked_to_begin_to_write_done_tensors(
    known: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Large ones, page by page, and never beyond the file; a system without the call, or one that refuses, is all the same."""
    asked: list[tuple[int, int, int]] = []

    class Libc:
        if known:

            @staticmethod
            def sync_file_range(fd: int, start: Any, size: Any, flags: Any) -> int:
                assert os.fstat(fd).st_size >= start.value + size.value and start.value % mmap.PAGESIZE == 0
                asked.append((start.value, size.value, flags.value))
                return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Libc)
    outs = [
        OutTensor(name, TensorSpec((size,), "uint8")) for name, size in (("a", 3 << 20), ("b", 100), ("c", 1 << 20))
    ]
    with Writer(tmp_path / "x.safetensors", lay_out(outs, single="x.safetensors"), outs) as writer:
        for out in outs:
            writer.region(out.name)[...] = 7
            writer.done(out.name)
        monkeypatch.undo()
        writer.commit()
    assert len(asked) == (2 if known else 0) and all(flags == 2 for *_, flags in asked)
    assert (tmp_path / "x.safetensors").read_bytes()[-(4 << 20) - 100 :] == b"\7" * ((4 << 20) + 100)


def test_placeholder_is_replaced_in_every_file(tmp_path: Path) -> None:
    outs = tensors(40, 40)
    layout = lay_out(outs, max_shard_bytes=50)
    with Writer(tmp_path / "model", layout, outs, metadata={"xxh3": "0" * 16, "tool": "x"}) as writer:
        for out in outs:
            writer.region(out.name)[...] = 1
        writer.set_metadata("xxh3", "0123456789abcdef")
        for key, value in (("xxh3", "short"), ("xxh3", '"' * 16), ("other", "")):
            with pytest.raises(ValueError, match="no placeholder"):
                writer.set_metadata(key, value)
        writer.commit()
    for file in layout.files:
        assert read_header(tmp_path / "model" / file)[0] == {"format": "pt", "tool": "x", "xxh3": "0123456789abcdef"}


def test_a_tensor_that_was_never_filled_stops_the_commit(tmp_path: Path) -> None:
    outs = tensors(1, 2)
    with Writer(tmp_path / "x.safetensors", lay_out(outs, single="x.safetensors"), outs) as writer:
        writer.region("t0")[...] = 1
        with pytest.raises(OutputError, match=r"x\.safetensors: 1 tensors were never requested from the writer: t1$"):
            writer.commit()
    assert list(tmp_path.iterdir()) == []


def test_misuse(tmp_path: Path) -> None:
    outs = tensors(1)
    layout = lay_out(outs, single="x.safetensors")
    with pytest.raises(ValueError, match="not of these tensors"):
        Writer(tmp_path / "x.safetensors", layout, tensors(1, 2))
    with pytest.raises(OutputError, match=r"expected one file, got x\.safetensors; give a directory"):
        Writer(tmp_path / "y.safetensors", layout, outs)
    with pytest.raises(OutputError, match=r"expected one file, got .*config\.json; give a directory"):
        Writer(tmp_path / "x.safetensors", layout, outs, extra_files={"config.json": b""})
    for name in ("", "..", "a/b", "../x", "model.safetensors", "nul\0"):
        with pytest.raises(OutputError, match="is not a valid name of an extra file"):
            Writer(tmp_path / "model", lay_out(outs), outs, extra_files={name: b""})
    writer = Writer(tmp_path / "x.safetensors", layout, outs)
    for call in (writer.commit, lambda: writer.region("t0")):
        with pytest.raises(ValueError, match="not open"):
            call()
    with writer:
        writer.region("t0")[...] = 1
        writer.commit()
        for call in (writer.commit, lambda: writer.region("t0")):
            with pytest.raises(ValueError, match="not open"):
                call()
