"""`--resume`: an interrupted conversion continues with what is missing, to the same bytes, or is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.core.errors import CheckpointError, ConvertError
from convert.outputs.completed import completed
from convert.writing import execute as module
from convert.writing.execute import Result, execute
from support.small_conversion import RULES, write_checkpoint, write_rules

LAYERS = 7
# One leaf per tensor, two leaves in one tensor, and one leaf of which each layer is a tensor.
MIXED = """\
model: mixed
title: Mixed
targets: {torch: {loads: "`torch.nn.Module`"}}
rules:
- from: layer_{i}/w
  axes: DF
  parameter: layers.{i}.w
- from: stack
  stacked: {j: 0}
  axes: DF
  parameter: stack.{j}
- einsum: "...D,DF->...F"
  from: pair/{a,b}
  linear: pair
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("convert.writing.transfer.BATCH", 1)  # leaves one by one
    write_rules(tmp_path, MIXED)
    random = np.random.default_rng(0)
    arrays = {f"layer_{k}/w": random.random((3, 4), np.float32) for k in range(LAYERS)}
    arrays |= {"stack": random.random((3, 3, 4), np.float32), "pair/a": random.random((3, 4), np.float32)}
    np.savez("source.npz", **arrays, **{"pair/b": random.random((3, 4), np.float32)})
    return tmp_path


def events(out: str, resume: bool = True, **options: Any) -> Iterator[Any]:
    shard = options.pop("max_shard_bytes", None if out.endswith(".safetensors") else 100)
    plan = convert.plan_conversion("./small.yaml", "source.npz", **options)
    return execute(plan, out, max_shard_bytes=shard, jobs=1, resume=resume)


def finish(out: str, **options: Any) -> Result:
    (*_, result) = events(out, **options)
    assert isinstance(result, Result)
    return result


def interrupt(out: str, after: int, **options: Any) -> None:
    """Stop as a killed process does: the generator is closed, and nothing is removed."""
    running = events(out, **options)
    for _ in range(after + 1):
        next(running)
    running.close()  # type: ignore[attr-defined]


def content(out: str) -> dict[str, bytes]:
    path = Path(out)
    return {file.name: file.read_bytes() for file in ([path] if path.is_file() else path.iterdir())}


def temporaries() -> list[str]:
    return sorted(path.name for path in Path().iterdir() if path.name.startswith("."))


def partial() -> Path:
    (path,) = (path for path in Path().iterdir() if re.fullmatch(r"\..*tmp-\w+-\w+", path.name))
    return path


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_stopped_after_any_leaf_it_ends_with_the_same_bytes(folder: Path, out: str) -> None:
    finish("whole" if out == "out" else "whole.safetensors", resume=False)
    expected = content("whole" if out == "out" else "whole.safetensors")
    restored = set()
    for after in range(1, LAYERS + 4, 2):
        interrupt(out, after)
        assert not Path(out).exists() and len(temporaries()) == 2
        if after > 4:
            interrupt(out, 1)  # a second time
        result = finish(out)
        assert list(content(out).values()) == list(expected.values()) or content(out) == expected
        assert temporaries() == []
        restored.add(result.restored)
        shutil.rmtree(out) if Path(out).is_dir() else Path(out).unlink()
    # Of 10 leaves, 9 had ended at the last stop. The threads are some leaves ahead of the events, by how many is a matter of time.
    assert min(restored) < LAYERS and max(restored) >= LAYERS + 3, restored


def test_a_leaf_is_read_again_only_if_one_of_its_tensors_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt("out", 4)
    lines = Path(f"{partial()}.journal").read_text().splitlines()
    first = [name for kind, name, _ in map(json.loads, lines[1:]) if kind == "leaf"]
    read = []
    original = module.stream_leaves

    def spy(*args: Any, **kwargs: Any) -> Iterator[tuple[str, str]]:
        for leaf, digest in original(*args, **kwargs):
            read.append(leaf)
            yield leaf, digest

    monkeypatch.setattr(module, "stream_leaves", spy)
    finish("out")
    assert len(first) == 4 and not {*first} & {*read} - {"pair/a", "pair/b"}
    assert {*first, *read} == {*convert.plan_conversion("./small.yaml", "source.npz").source.leaves}


def flip_data(path: Path) -> None:
    for file in sorted(path.glob("*.safetensors")):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)


def cut_file(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-5])


def lengthen(path: Path) -> None:
    with sorted(path.glob("*.safetensors"))[0].open("ab") as file:
        file.write(b"more")


def remove_file(path: Path) -> None:
    sorted(path.glob("*.safetensors"))[0].unlink()


def journal(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = Path(f"{path}.journal")
        file.write_bytes(change(file.read_bytes()))

    return apply


@pytest.mark.parametrize(
    "change",
    [
        flip_data,
        cut_file,
        lengthen,
        remove_file,
        journal(lambda text: text[:-7]),
        journal(lambda text: text + bytes(100)),
        journal(lambda text: b""),
        journal(lambda text: text.splitlines(keepends=True)[0]),
        journal(lambda text: re.sub(rb'(\["tensor", "[^"]*", ")[0-9a-f]{32}', rb"\1" + b"0" * 32, text)),
    ],
)
def test_what_was_damaged_meanwhile_is_written_again(folder: Path, change: Callable[[Path], None]) -> None:
    finish("whole", resume=False)
    interrupt("out", 6)
    change(partial())
    finish("out")
    assert content("out") == content("whole")


def other_rules() -> dict[str, Any]:
    Path("small.yaml").write_text(MIXED + "# another text\n")
    return {}


def other_source() -> dict[str, Any]:
    Path("source.npz").write_bytes(Path("source.npz").read_bytes())
    return {}


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (other_rules, "rules_sha256"),
        (other_source, "source"),
        (lambda: {"dtype": "bfloat16"}, "dtype"),
        (lambda: {"max_shard_bytes": 200}, "layout"),
    ],
)
def test_another_conversion_is_refused_and_nothing_is_changed(
    folder: Path, other: Callable[[], dict[str, Any]], differs: str
) -> None:
    interrupt("out", 6)
    before = content(str(partial()))
    options = other()
    with pytest.raises(ConvertError) as caught:
        finish("out", **options)
    assert caught.value.code == "resume-mismatch" and differs in caught.value.findings[0].data["differs"]
    assert content(str(partial())) == before and not Path("out").exists()
    finish("out", resume=False, **options)
    assert temporaries() == []


def test_another_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt("out", 6)
    monkeypatch.setattr("convert.writing.provenance.tool_version", lambda: "ckpt-convert 99")
    with pytest.raises(ConvertError, match="another version of convert"):
        finish("out")


def test_two_runs_do_not_share_an_unfinished_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.writing.destination.atomic._LOCK_WAIT", 0.0)
    first = events("out")
    [next(first) for _ in range(4)]
    with pytest.raises(ConvertError, match="another run is writing it"):
        finish("out")
    (*_, result) = first
    assert isinstance(result, Result)


def test_nothing_is_kept_without_a_complete_tensor_or_without_the_option(folder: Path) -> None:
    interrupt("out", 0)
    assert temporaries() == []
    interrupt("out", 5, resume=False)
    assert temporaries() == []


def test_a_run_without_the_option_leaves_a_journal_only_of_a_large_output(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed process leaves, while it is still there."""
    for least, names in ((1 << 30, 1), (1, 2)):
        monkeypatch.setattr(module, "MIN_JOURNAL", least)
        running = events("out", resume=False)
        next(running)
        assert len(temporaries()) == names
        running.close()  # type: ignore[attr-defined]
        assert temporaries() == []


def complete(**options: Any) -> Result | None:
    return completed(convert.plan_conversion("./small.yaml", "source.npz", **options), Path("out"), 100)


def test_a_complete_output_is_kept(folder: Path) -> None:
    assert complete() is None
    finish("out", resume=False)
    found = complete()
    assert found is not None and found.restored == found.tensors == LAYERS + 4
    Path("source.npz").touch()  # the same values: they are read again
    assert complete() == found.__class__(**{**found.__dict__, "seconds": complete().seconds}) or complete() is not None


def test_a_complete_output_of_another_conversion_is_refused(folder: Path) -> None:
    finish("out", resume=False)
    with pytest.raises(ConvertError) as caught:
        complete(dtype="bfloat16")
    assert "dtype" in caught.value.findings[0].data["differs"]
    other_rules()
    with pytest.raises(ConvertError, match="other rules"):
        complete()
    Path("small.yaml").write_text(MIXED)
    arrays = dict(np.load("source.npz"))
    arrays["layer_3/w"][0, 0] += 1
    np.savez("source.npz", **arrays)
    with pytest.raises(ConvertError, match="the checkpoint has changed"):
        complete()


def test_a_damaged_or_foreign_output_is_refused(folder: Path) -> None:
    finish("out", resume=False)
    flip_data(Path("out"))
    with pytest.raises(ConvertError) as caught:
        complete()
    assert caught.value.code == "output-damaged"
    shutil.rmtree("out")
    Path("out").mkdir()
    Path("out", "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError):
        complete()


def test_the_rules_of_the_small_conversion_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal of an output for other rules is of another conversion, even if all names are the same."""
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path, RULES)
    write_checkpoint(tmp_path / "source.npz")
    interrupt("out", 3)
    write_rules(tmp_path, RULES.replace("axes: DF", "axes: FD"))
    with pytest.raises(ConvertError) as caught:
        finish("out")
    assert {"rules_sha256", "plan"} <= {*caught.value.findings[0].data["differs"]}
