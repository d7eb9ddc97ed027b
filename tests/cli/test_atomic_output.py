"""The output appears whole or not at all, an existing one is kept, and nothing of the user's is lost."""

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from convert.core.errors import OutputError
from convert.core.system import file_calls
from convert.core.tensor_spec import TensorSpec
from convert.writing.destination import atomic
from convert.writing.file_layout import OutTensor, lay_out
from convert.writing.writer import Writer
from support.marks import slow_but

TENSORS = [OutTensor("a", TensorSpec((40,), "uint8")), OutTensor("b", TensorSpec((40,), "uint8"))]


def write(out: Path, value: int = 1, *, shards: bool = False, **options: Any) -> None:
    single = out.name if out.suffix == ".safetensors" else None
    layout = lay_out(TENSORS, single=single, max_shard_bytes=50 if shards else None)
    with Writer(out, layout, TENSORS, **options) as writer:
        for tensor in TENSORS:
            writer.region(tensor.name)[...] = value
        writer.commit()


def value_of(file: Path) -> int:
    return int(next(iter(safetensors.numpy.load_file(file).values()))[0])


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def in_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    script = textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# --- an existing output ---------------------------------------------------------------------------------------------


def test_an_existing_file_is_kept_unless_overwrite(tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    write(out, 1)
    with pytest.raises(OutputError, match=r"x\.safetensors: exists and is kept; replace it with --overwrite, or give"):
        write(out, 2)
    assert value_of(out) == 1
    write(out, 2, overwrite=True)
    assert value_of(out) == 2
    assert names(tmp_path) == ["x.safetensors"]


def test_an_existing_directory_is_kept_unless_overwrite_or_empty(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    write(out, 1)
    with pytest.raises(
        OutputError, match="model: exists and is not empty; replace its model with --overwrite, or give"
    ):
        write(out, 2)
    assert value_of(out / "model.safetensors") == 1
    write(out, 2, overwrite=True)
    assert value_of(out / "model.safetensors") == 2
    assert names(tmp_path) == ["model"]


OTHER_LIBRARIES = (  # diffusers, PEFT
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.fp16.safetensors",
    "diffusion_pytorch_model-00001-of-00002.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
)


def test_a_new_file_takes_the_place_of_an_old_one(tmp_path: Path) -> None:
    """Also of one that no library loads by its name: the old file was put over the new one."""
    out = tmp_path / "model"
    write(out, 1, extra_files={"notes.txt": b"old"})
    write(out, 2, extra_files={"notes.txt": b"new"}, overwrite=True)
    assert (out / "notes.txt").read_bytes() == b"new" and value_of(out / "model.safetensors") == 2


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """An older, sharded output with a variant, to which its owner has added files."""
    out = tmp_path / "model"
    write(out, 1, shards=True, extra_files={"config.json": b"old", "generation_config.json": b"old"})
    for name in ("README.md", "tokenizer.json", ".gitattributes", "my_model.safetensors", "model_card.json"):
        (out / name).write_text("mine")
    (out / "original" / "deep").mkdir(parents=True)
    (out / "original" / "deep" / "x.pt").write_text("mine")
    (out / "link").symlink_to("README.md")
    (out / "broken").symlink_to("nowhere")
    (out / "model.fp16.safetensors").write_text("old")
    (out / "model.fp16-00001-of-00002.safetensors").write_text("old")
    (out / "model.safetensors.index.fp16.json").write_text("old")
    for name in OTHER_LIBRARIES:
        (out / name).write_text("old")
    out.chmod(0o750)
    return out


KEPT = {"README.md", "tokenizer.json", ".gitattributes", "my_model.safetensors", "model_card.json", "original", "link"}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_overwriting_replaces_the_model_and_keeps_everything_else(
    old: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(file_calls, "exchange", lambda a, b: False)
    inode = (old / "README.md").stat().st_ino
    write(old, 2, overwrite=True, extra_files={"generation_config.json": b"new"})
    assert set(names(old)) == KEPT | {"model.safetensors", "generation_config.json", "broken"}
    assert value_of(old / "model.safetensors") == 2
    assert (old / "generation_config.json").read_bytes() == b"new"
    assert (old / "original" / "deep" / "x.pt").read_text() == "mine"
    assert (old / "link").is_symlink() and (old / "link").read_text() == "mine"
    assert (old / "broken").readlink() == Path("nowhere")
    assert (old / "README.md").stat().st_ino == inode
    assert old.stat().st_mode & 0o777 == 0o750
    assert names(old.parent) == ["model"]


def test_kept_files_are_copied_where_links_are_not_possible(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    write(old, 2, overwrite=True)
    assert set(names(old)) >= KEPT
    assert (old / "original" / "deep" / "x.pt").read_text() == "mine"
    write(old.parent / "x.safetensors", 3)
    assert value_of(old.parent / "x.safetensors") == 3
    with pytest.raises(OutputError, match="exists and is kept"):
        write(old.parent / "x.safetensors", 4)


def test_from_one_file_to_shards_and_back_leaves_no_mixture(tmp_path: Path) -> None:
    out = tmp_path / "model"
    write(out, 1)
    write(out, 2, shards=True, overwrite=True, extra_files={"config.json": b"{}"})
    assert names(out) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    write(out, 3, overwrite=True)
    assert names(out) == ["model.safetensors"]


def test_failed_overwriting_leaves_the_old_one_untouched(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(old)

    def fail(*arguments: object) -> bool:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(file_calls, "exchange", fail)
    with pytest.raises(OutputError, match="model: cannot be written: broken disk"):
        write(old, 2, overwrite=True)
    monkeypatch.setattr(file_calls, "exchange", lambda a, b: False)
    rename = Path.rename

    def fail_second(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, "broken disk")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_second)
    with pytest.raises(OutputError, match="model: cannot be written: broken disk"):
        write(old, 2, overwrite=True)
    assert tree(old) == before
    assert names(old.parent) == ["model"]


@pytest.mark.parametrize("name", ["x.safetensors", "model"])
def test_what_appears_meanwhile_is_kept(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    layout = lay_out(TENSORS, single=name if "." in name else None)
    with (
        pytest.raises(OutputError, match=f"{name}: another program created it while this run was writing; it is kept"),
        Writer(out, layout, TENSORS) as writer,
    ):
        writer.region("a")[...] = writer.region("b")[...] = 1
        write(out, 2)
        writer.commit()
    assert value_of(out if out.is_file() else out / "model.safetensors") == 2
    assert names(tmp_path) == [name]


def test_a_file_that_appears_where_a_directory_was_to_be(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="model: another program created it"),
        Writer(tmp_path / "model", lay_out(TENSORS), TENSORS) as writer,
    ):
        writer.region("a")[...] = writer.region("b")[...] = 1
        (tmp_path / "model").write_text("mine")
        writer.commit()
    assert names(tmp_path) == ["model"]


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "disk" / "real")
    (tmp_path / "x.safetensors").symlink_to("disk/y")
    for value in (1, 2):
        write(tmp_path / "model", value, overwrite=True)
        write(tmp_path / "x.safetensors", value, overwrite=True)
    assert (tmp_path / "model").is_symlink() and (tmp_path / "x.safetensors").is_symlink()
    assert value_of(tmp_path / "disk" / "real" / "model.safetensors") == 2
    assert value_of(tmp_path / "disk" / "y") == 2
    assert names(tmp_path / "disk") == ["real", "y"]


# --- refusals -------------------------------------------------------------------------------------------------------


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.safetensors").mkdir()
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "p.safetensors")
    (tmp_path / "cwd" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd" / "below")
    for out, message in {
        tmp_path / "no" / "x.safetensors": r"no/x\.safetensors: the directory .*/no does not exist; create it first",
        tmp_path / "no" / "model": "the directory .*/no does not exist; create it first",
        tmp_path / "file" / "model": "the directory .*/file does not exist",
        tmp_path / "d.safetensors": "is a directory; give another name for the file",
        tmp_path / "p.safetensors": "is not a regular file",
        tmp_path / "file": r"is a file; give a directory, or a name ending in \.safetensors",
        tmp_path / "cwd": "contains the current directory and would be replaced; run from another directory",
        Path("/"): "is a root directory",
    }.items():
        with pytest.raises(OutputError, match=message):
            write(out, overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc").is_mount(), reason="/proc is not mounted")
def test_mount_points_cannot_be_replaced() -> None:
    with pytest.raises(
        OutputError, match="is a mount point, which cannot be replaced; give a directory in it: /proc/model"
    ):
        write(Path("/proc"), overwrite=True)


def test_name_too_long_for_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: File name too long"):
        write(tmp_path / ("x" * 240))


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "open", refuse)
    for name in ("x.safetensors", "model"):
        with pytest.raises(
            OutputError,
            match=f"{name}: {os.strerror(code)}: the temporary file lies in {tmp_path}; make that directory writable",
        ):
            write(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_write_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match=f"{tmp_path} must be writable"):
        write(tmp_path / "model")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("name", ["x.safetensors", "model"])
def test_full_disk_is_an_error_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OutputError) as caught:
        write(tmp_path / name)
    assert re.search(
        rf"{name}: No space left on device: expected 2\d\d free bytes in {tmp_path}, got [\d,]+; make room, or write",
        str(caught.value),
    )
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["x.safetensors", "model"])
def test_really_full_disk(tmp_path: Path, name: str) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("may not mount a small tmpfs")
    try:
        tensors = [OutTensor(str(i), TensorSpec((600_000,), "uint8")) for i in range(2)]
        layout = lay_out(
            tensors, single=name if "." in name else None, max_shard_bytes=None if "." in name else 600_000
        )
        with pytest.raises(OutputError, match=r"expected 1,200,\d\d\d free bytes in .*, got 1,048,576"):
            Writer(tmp_path / name, layout, tensors).__enter__()
        assert names(tmp_path) == []
        write(tmp_path / name)
        assert names(tmp_path) == [name]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.EINVAL])
def test_file_systems_that_cannot_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        if code is None:
            raise AttributeError("posix_fallocate")  # as on macOS
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(file_calls, "_ZEROS", 7)
    write(tmp_path / "x.safetensors", 5)
    assert value_of(tmp_path / "x.safetensors") == 5


# --- interruption ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.safetensors", "model"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_errors_remove_the_temporary(tmp_path: Path, name: str, error: type[BaseException]) -> None:
    with (
        pytest.raises(error),
        Writer(tmp_path / name, lay_out(TENSORS, single=name if "." in name else None), TENSORS) as writer,
    ):
        region = writer.region("a")
        assert len(names(tmp_path)) == 1
        raise error
    assert names(tmp_path) == []
    region[...] = 1  # the mapping outlives the file: no crash


@pytest.mark.parametrize("name", ["x.safetensors", "model"])
def test_leaving_without_commit_writes_nothing(tmp_path: Path, name: str) -> None:
    with Writer(tmp_path / name, lay_out(TENSORS, single=name if "." in name else None), TENSORS):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("at", ["mkdir", "flock", "posix_fallocate", "fsync", "link"])
@pytest.mark.parametrize("name", ["x.safetensors", "model"])
def test_interrupt_anywhere_removes_the_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: str
) -> None:
    module = atomic.fcntl if at == "flock" else os
    genuine = getattr(module, at)
    used = []

    def interrupt(*arguments: Any, **options: Any) -> None:
        used.append(genuine(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, at, interrupt)
    if (name, at) in {("x.safetensors", "mkdir"), ("model", "link")}:
        write(tmp_path / name)
        assert not used
    else:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / name)
        assert [entry for entry in names(tmp_path) if entry != name] == []
        assert names(tmp_path) == ([name] if at == "link" else [])


KILLED = """
    import sys, time
    from pathlib import Path
    from convert.core.tensor_spec import TensorSpec
    from convert.writing.file_layout import OutTensor, lay_out
    from convert.writing.writer import Writer
    out = Path(sys.argv[1])
    tensors = [OutTensor("a", TensorSpec((40,), "uint8")), OutTensor("b", TensorSpec((40,), "uint8"))]
    layout = lay_out(tensors, single=out.name if "." in out.name else None)
    with Writer(out, layout, tensors) as writer:
        writer.region("a")[...] = 9
        print("half", flush=True)
        time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.safetensors", "model"])
def test_kill_leaves_nothing_that_looks_valid_and_the_next_run_tidies_up(tmp_path: Path, name: str) -> None:
    process = in_python(KILLED, tmp_path / name)
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    (temporary,) = names(tmp_path)
    assert re.fullmatch(rf"\.{re.escape(name)}\.tmp-[0-9a-f]{{6}}-[0-9a-f]{{8}}", temporary)
    write(tmp_path / name, 1)  # a live one is left alone
    assert names(tmp_path) == [temporary, name]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert names(tmp_path) == [temporary, name]
    assert not list(tmp_path.glob("*.safetensors")) or name == "x.safetensors"
    write(tmp_path / "other", 1)  # not that one's
    assert temporary in names(tmp_path)
    elsewhere = tmp_path / f".{name}.tmp-ffffff-00000000"
    elsewhere.write_text("of another machine")
    (tmp_path / f".{name}.tmp-notes").write_text("mine")
    write(tmp_path / name, 2, overwrite=True)
    assert names(tmp_path) == sorted([elsewhere.name, f".{name}.tmp-notes", name, "other"])


def test_locks_that_are_not_supported_disable_tidying_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(atomic.fcntl, "flock", refuse)
    stale = tmp_path / f"{atomic._prefix(tmp_path / 'model')}00000000"
    stale.mkdir()
    write(tmp_path / "model")
    assert names(tmp_path) == [stale.name, "model"]


def test_a_temporary_lost_to_another_run_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = atomic.fcntl.flock
    lost = []

    def lose(fd: int, operation: int) -> None:
        if len(lost) < 2:
            (path,) = tmp_path.iterdir()
            path.unlink() if path.is_file() else path.rmdir()
            lost.append(path)
        genuine(fd, operation)

    monkeypatch.setattr(atomic.fcntl, "flock", lose)
    write(tmp_path / "model")
    assert len(lost) == 2
    assert names(tmp_path) == ["model"]
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model").rmdir()
    monkeypatch.setattr(file_calls, "is_at", lambda fd, path: False)
    with pytest.raises(OutputError, match="other runs keep removing the temporary file of this run"):
        write(tmp_path / "model")


def test_runs_at_the_same_time_leave_one_whole_output(tmp_path: Path) -> None:
    failures = []

    def run(value: int) -> None:
        try:
            write(tmp_path / "model", value, overwrite=value % 2 == 0, shards=value % 3 == 0)
        except OutputError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=run, args=(value,)) for value in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [entry for entry in names(tmp_path) if entry != "model"] == []
    values = {value_of(file) for file in (tmp_path / "model").glob("*.safetensors")}
    assert len(values) == 1


# A child per system call of a run, killed just before it: every state that a crash can leave.
CRASHES = """
    import os, shutil, sys
    from pathlib import Path
    from convert.core.system import file_calls
    from convert.core.tensor_spec import TensorSpec
    from convert.writing.file_layout import OutTensor, lay_out
    from convert.writing.writer import Writer

    root, kind, overwrite, exchange = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", sys.argv[4] == "1"
    tensors = [OutTensor("a", TensorSpec((40,), "uint8")), OutTensor("b", TensorSpec((40,), "uint8"))]
    CALLS = "open close mkdir rmdir link unlink rename replace fsync posix_fallocate chmod".split()

    def write(out, value, **options):
        single = out.name if kind == "x.safetensors" else None
        layout = lay_out(tensors, single=single, max_shard_bytes=None if single else 50)
        with Writer(out, layout, tensors, **options) as writer:
            for tensor in tensors:
                writer.region(tensor.name)[...] = value
            writer.commit()

    def snapshot(path):
        if path.is_file():
            return path.read_bytes()
        if not path.exists():
            return None
        return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}

    def setup(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if overwrite:
            write(folder / kind, 1)
            if kind == "model":
                (folder / kind / "model.safetensors").write_text("stale")
                (folder / kind / "README.md").write_text("mine")
                (folder / kind / "sub").mkdir()
                (folder / kind / "sub" / "x").write_text("mine")

    def run(folder):
        write(folder / kind, 2, overwrite=overwrite)

    setup(root / "a")
    before = snapshot(root / "a" / kind)
    run(root / "a")
    after = snapshot(root / "a" / kind)
    if not exchange:
        file_calls.exchange = lambda a, b: False
    states = set()
    for crash in range(1000):
        setup(root / "b")
        child = os.fork()
        if child == 0:
            left = crash
            def counted(call):
                def wrapper(*arguments, **options):
                    global left
                    if left == 0:
                        os._exit(9)
                    left -= 1
                    return call(*arguments, **options)
                return wrapper
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            file_calls.exchange = counted(file_calls.exchange)
            run(root / "b")
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        now = snapshot(root / "b" / kind)
        if now == after:
            state = "new"
        elif now == before:
            state = "old"
        elif now is None and not exchange and [snapshot(p) for p in (root / "b").glob(".*.old-*")] == [before]:
            state = "aside"
        else:
            sys.exit(f"after {crash} calls: {now}")
        states.add(state)
        for entry in (root / "b").iterdir():
            if entry.name != kind and (not entry.name.startswith("." + kind) or entry.suffix == ".safetensors"):
                sys.exit(f"after {crash} calls: {entry}")
        if status == 0:
            break
        if status != 9:
            sys.exit(f"status {status}")
        write(root / "b" / kind, 2, overwrite=True)
        left_over = [p.name for p in (root / "b").iterdir() if p.name != kind and ".old-" not in p.name]
        if left_over:
            sys.exit(f"after {crash} calls, not tidied: {left_over}")
    print(crash > 5, *sorted(states))
"""


CRASHED = [
    ("x.safetensors", False, True, "new old"),
    ("x.safetensors", True, True, "new old"),
    ("model", False, True, "new old"),
    ("model", True, True, "new old"),
    ("model", True, False, "aside new old"),
]


@pytest.mark.parametrize(("kind", "overwrite", "exchange", "states"), slow_but(CRASHED[1:2], CRASHED))
def test_a_crash_at_any_system_call_leaves_the_old_output_or_the_new_one(
    tmp_path: Path, kind: str, overwrite: bool, exchange: bool, states: str
) -> None:
    process = in_python(CRASHES, tmp_path, kind, int(overwrite), int(exchange))
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output == f"True {states}\n"
