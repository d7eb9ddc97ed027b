"""Errors of the operating system while a checkpoint is opened: an error with its reason, not a wrong guess or a traceback."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import convert
from convert.checkpoints.source import stamps
from convert.core.errors import CheckpointError
from support.goldens import checkpoint

PLACES = ["os.stat", "os.scandir", "os.listdir", "io.open"]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("place", PLACES)
def test_each_call_that_fails(place: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The n-th call for a path of the checkpoint fails, for every n."""
    path = checkpoint("timesfm-2.5")
    module = __import__(place.split(".")[0])
    function = place.split(".")[1]
    genuine = getattr(module, function)
    count = failing = 0

    def call(name: object = ".", *args: object, **options: object) -> object:
        nonlocal count
        if str(path) in str(name):
            count += 1
            if count == failing:
                raise OSError(number, os.strerror(number), str(name))
        return genuine(name, *args, **options)

    monkeypatch.setattr(module, function, call)
    while failing < 40:
        failing, count = failing + 1, 0
        try:
            convert.open_source(path)
        except CheckpointError as error:
            assert error.code in ("checkpoint-unreadable", "file-not-readable"), (failing, str(error))
            assert os.strerror(number) in str(error)
            assert number != errno.EMFILE or "ulimit -n" in str(error)
        if count < failing:
            break


def test_half_of_a_surrogate_pair_in_the_names(tmp_path: Path) -> None:
    for file in checkpoint("timesfm-2.5").rglob("*"):
        if file.is_file():
            copy = tmp_path / file.relative_to(checkpoint("timesfm-2.5"))
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    (metadata,) = tmp_path.rglob("_METADATA")
    metadata.write_text(metadata.read_text().replace("stacked_xf", "stacked_xf\\ud800"))
    with pytest.raises(CheckpointError) as caught:
        convert.open_source(tmp_path)
    (finding,) = caught.value.findings
    assert finding.code == "checkpoint-corrupt" and "\\ud800" in finding.got and finding.expected and finding.fix
    str(caught.value).encode()


def test_a_file_that_is_rewritten_with_its_old_time_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a")
    before, times = stamps([file]), file.stat()
    while file.stat().st_ctime_ns == times.st_ctime_ns:  # the clock of the file system may be coarse
        file.write_bytes(b"b")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stamps([file]) != before
