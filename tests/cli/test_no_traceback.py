"""What the surroundings of the program lack is an error with its reason, or changes nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.core.errors import OptionError
from support import writers
from support.command_line import Run
from support.goldens import checkpoint
from support.marks import slow_but


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
@pytest.mark.parametrize("options", slow_but([["--full"]], [[], ["--json"], ["--full"]]))
def test_names_that_the_encoding_of_stdout_lacks(options: list[str], variables: dict[str, str], tmp_path: Path) -> None:
    path = writers.npz(tmp_path / "m.npz", {"größe/kernel": np.zeros((2, 3), np.float32)})
    done = subprocess.run(
        [sys.executable, "-m", "convert", "inspect", str(path), *options],
        capture_output=True,
        env={**os.environ, "PYTHONCOERCECLOCALE": "0", **variables},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"gr\xf6\xdfe" in done.stdout or rb"gr\u00f6\u00dfe" in done.stdout


def test_no_thread_can_be_started(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    _, stderr = run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "o.safetensors", "--jobs", 3, code=2)
    assert stderr.startswith("error[thread-not-started]: ") and "--jobs 1" in stderr and "expected" in stderr
    assert not list(tmp_path.iterdir())


def fail_fsync(monkeypatch: pytest.MonkeyPatch, directory: Path, number: int) -> None:
    genuine, status = os.fsync, directory.stat()

    def fsync(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), status):
            raise OSError(number, os.strerror(number))
        genuine(fd)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("out", ["o.safetensors", "out"])
def test_the_directory_of_a_complete_output_cannot_be_synced(
    out: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_fsync(monkeypatch, tmp_path, errno.EIO)
    _, stderr = run("timesfm", checkpoint("timesfm-2.5"), tmp_path / out, code=2)
    assert stderr.startswith("error[output-not-synced]: ") and "Input/output error" in stderr
    assert "cannot be written" not in stderr and "complete" in stderr
    assert [path.name for path in tmp_path.iterdir()] == [out]


def test_a_file_system_that_syncs_no_directories(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_fsync(monkeypatch, tmp_path, errno.EINVAL)
    run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "o.safetensors", "-q")


@pytest.mark.parametrize("value", ["nan", "NaN", ".nan", "inf", "Infinity", "-Infinity", "1e999"])
def test_a_fact_that_is_no_finite_number(value: str, run: Run, tmp_path: Path) -> None:
    args = ("gpt2", checkpoint("gpt2"), tmp_path / "out", "--set", f"layer_norm_epsilon={value}")
    _, stderr = run(*args, code=2)
    assert stderr.startswith("error[setting-invalid]: ") and "above 0" in stderr
    assert not list(tmp_path.iterdir())


def test_a_fact_of_the_source_that_is_no_finite_number(run: Run, tmp_path: Path) -> None:
    source = Path(shutil.copytree(checkpoint("gpt2"), tmp_path / "ckpt"))
    config = next(source.rglob("config.json"))
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "layer_norm_epsilon": float("nan")}))
    _, stderr = run("gpt2", source, tmp_path / "out", code=2)
    assert stderr.startswith("error[sidecar-invalid]: ") and "NaN" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_setting_that_is_no_finite_number(value: float, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="above 0"):
        convert.plan_conversion("gpt2", checkpoint("gpt2"), settings={"layer_norm_epsilon": value})


def test_rules_on_a_stale_mount(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path == tmp_path:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return genuine(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    _, stderr = run("plan", "mine", checkpoint("gpt2"), "--rules", tmp_path, code=2)
    assert (
        stderr.startswith("error[file-not-readable]: ") and "Stale file handle" in stderr and "Traceback" not in stderr
    )


@pytest.mark.slow
def test_a_config_with_which_the_target_fails(run: Run, tmp_path: Path) -> None:
    """The shipped reference takes an object from transformers; the file makes it a tuple."""
    run("gpt2", checkpoint("gpt2"), tmp_path / "out", "-q")
    config = tmp_path / "out" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "return_dict": False}))
    stdout, stderr = run("check", tmp_path / "out", "--from", checkpoint("gpt2"), "--level", "model", "--json", code=2)
    (level,) = json.loads(stdout)["levels"]
    assert level["verdict"] == "inconclusive" and "Traceback" not in stderr
    assert "AttributeError" in level["reason"] and "config.json" in level["reason"]


# ---- found by errors at random system calls


FAILING_HDF5 = """
import sys
from contextlib import contextmanager
from convert.checkpoints.formats import keras
genuine, left = keras.opened, [int(sys.argv.pop(1))]
class Failing:
    def __init__(self, file):
        self.file = file
    def __getattr__(self, name):
        return getattr(self.file, name)
    def readinto(self, into):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(13, "Permission denied")
        return self.file.readinto(into)
@contextmanager
def opened(path):
    with genuine(path) as file:
        yield Failing(file)
keras.opened = opened
from convert.cli import program
program()
"""


@pytest.mark.slow
@pytest.mark.parametrize("reads", [22, 24])  # while the second leaf is opened
def test_an_hdf5_file_that_can_no_longer_be_read_ends_with_an_error(reads: int, tmp_path: Path) -> None:
    """The HDF5 library keeps such a file open, and closed it after Python had ended: a segmentation fault."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "k.weights.h5", "w") as file:
        file["layers/dense/vars/0"], file["layers/dense/vars/1"] = np.ones((3, 4), "f4"), np.ones(4, "f4")
    rules = "".join(f"- {{from: layers/dense/vars/{k}, parameter: p{k}}}\n" for k in (0, 1))
    (tmp_path / "r.yaml").write_text(f"model: m\ntitle: M\ntargets: {{torch: {{loads: T}}}}\nrules:\n{rules}")
    args = [tmp_path / "r.yaml", tmp_path / "k.weights.h5", tmp_path / "o.safetensors"]
    done = subprocess.run(
        [sys.executable, "-c", FAILING_HDF5, str(reads), *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "error[checkpoint-unreadable]" in done.stderr, done
    assert not (tmp_path / "o.safetensors").exists()


def failing(number: int) -> Callable[..., None]:
    def fail(*_: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_converted_file_that_can_no_longer_be_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "o.safetensors"
    run("timesfm", checkpoint("timesfm-2.5"), out)
    monkeypatch.setattr("convert.writing.written.mmap.mmap", failing(errno.EMFILE))
    _, stderr = run("check", out, "--from", checkpoint("timesfm-2.5"), "--level", "weights", code=2)
    assert stderr.startswith("error[file-not-readable]: ") and str(out) in stderr and "Too many open files" in stderr


def test_a_temporary_that_cannot_be_removed_does_not_hide_the_output(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", failing(errno.EROFS))
    out = tmp_path / "o.safetensors"
    run("timesfm", checkpoint("timesfm-2.5"), out)
    monkeypatch.undo()
    assert all(path.samefile(out) for path in tmp_path.iterdir())
    run("timesfm", checkpoint("timesfm-2.5"), out, "--overwrite")
    assert list(tmp_path.iterdir()) == [out]


def test_a_temporary_that_cannot_be_removed_does_not_hide_the_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    monkeypatch.setattr(shutil, "rmtree", failing(errno.ESTALE))  # it does not ignore all errors
    _, stderr = run("bert", checkpoint("bert"), tmp_path / "o", code=2)
    assert stderr.startswith("error[output-not-writable]: ") and "Input/output error" in stderr


def test_closing_fails_after_the_output_is_complete(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, genuine = tmp_path / "o.safetensors", os.close

    def close(fd: int) -> None:
        published = out.exists() and os.path.samestat(os.fstat(fd), out.stat())
        genuine(fd)
        if published:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", close)
    run("timesfm", checkpoint("timesfm-2.5"), out)
    assert list(tmp_path.iterdir()) == [out]


def test_a_draft_that_cannot_be_written_leaves_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        stream = genuine(path, mode, *args, **options)
        if mode == "x":
            stream.write = failing(errno.ENOSPC)  # type: ignore[method-assign]
        return stream

    monkeypatch.setattr(Path, "open", full)
    _, stderr = run("rules", "new", checkpoint("timesfm-2.5"), tmp_path / "new.yaml", code=2)
    assert stderr.startswith("error[output-not-writable]: ") and not list(tmp_path.iterdir())


def test_an_error_of_the_system_without_a_path(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convert.cli.conversion.to_pytorch.execute", failing(errno.EMFILE))
    _, stderr = run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "o.safetensors", code=2)
    assert stderr.startswith("error[file-not-readable]: a file cannot be read or written: Too many open files")
    monkeypatch.setattr("convert.cli.conversion.to_pytorch.execute", failing(errno.EBADF))
    _, stderr = run("timesfm", checkpoint("timesfm-2.5"), tmp_path / "o.safetensors", code=2)
    assert stderr.startswith("error[internal]: ")


@pytest.mark.parametrize("case", ["bert", "timesfm-2.5"])
def test_closing_a_file_that_was_read_fails(
    case: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = os.close

    def close(fd: int) -> None:
        genuine(fd)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "close", close)
    run(case.partition("-")[0], checkpoint(case), tmp_path / "o.safetensors")
