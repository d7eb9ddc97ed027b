"""SIGINT, SIGTERM and SIGHUP at every kind of moment: the exit code, one line on stderr, no unfinished output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.goldens import checkpoint
from support.marks import slow_but

# The child replaces itself at once, so a fork beside the threads of JAX, which other tests have loaded, does no harm.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LINE = {
    signal.SIGINT: "error[interrupted]: interrupted; no unfinished output is left\n",
    signal.SIGTERM: "error[interrupted]: terminated; no unfinished output is left\n",
    signal.SIGHUP: "error[interrupted]: terminated; no unfinished output is left\n",
}
SEND = """
import ctypes, os, signal, sys, threading
from pathlib import Path
NUMBER = int(sys.argv.pop(1))
def send():
    os.kill(os.getpid(), NUMBER)
def when_imported(name, then):
    class Finder:
        def find_spec(self, found, *_):
            if found == name:
                sys.meta_path.remove(finder)
                then()
    finder = Finder()
    sys.meta_path.insert(0, finder)
def before(module, name, then, times=1):
    genuine, left = getattr(module, name), [times]
    def called(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            then()
        return genuine(*args, **options)
    setattr(module, name, called)
"""
RUN = "\nfrom convert.cli import program\nprogram()\n"


def run(
    moment: str, number: int, args: Sequence[object], *, ignored: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `convert ARGS` in a process that does `moment` first, with the default dispositions or some ignored."""

    def dispositions() -> None:
        for each in NUMBERS:
            signal.signal(each, signal.SIG_IGN if each in ignored else signal.SIG_DFL)

    return subprocess.run(
        [sys.executable, "-c", SEND + moment + RUN, str(int(number)), *map(str, args)],
        capture_output=True,
        text=True,
        preexec_fn=dispositions,
        check=False,
    )


def conversion(folder: Path, *options: object, name: str = "out.safetensors") -> list[object]:
    return ["timesfm", checkpoint("timesfm-2.5"), folder / name, *options]


def assert_stopped(done: subprocess.CompletedProcess[str], number: signal.Signals) -> None:
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", LINE[number])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("module", ["convert.core.system", "convert.core.system.signals", "select"])
def test_before_the_handlers_are_installed(module: str, number: signal.Signals) -> None:
    code = f"""
import os, sys
sys.modules.pop({module!r}, None)
class Finder:
    def find_spec(self, found, *_):
        if found == {module!r}:
            os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Finder())
from convert.cli import program
program()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL) and None,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-number, "")


START = """
import os, sys
class Finder:
    def find_spec(self, found, *_):
        if found == {module!r}:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
"""
SCRIPT = "import sys\nfrom convert.cli import program\nif __name__ == '__main__':\n    sys.exit(program())\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("start", "module"),
    [("module", "convert.__main__"), ("module", "convert.cli"), ("script", "convert.cli"), ("script", "convert.core")],
)
def test_while_python_loads_the_program(start: str, module: str, number: signal.Signals, tmp_path: Path) -> None:
    """Before `program` is called, there is no handler: the signal ends the process, without a traceback."""
    (tmp_path / "sitecustomize.py").write_text(START.format(module=module, number=int(number)))
    script = tmp_path / "bin" / "convert"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *(["-m", "convert"] if start == "module" else [script]), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL) and None,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")


def test_a_program_that_imports_the_package_keeps_its_handlers(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("import signal, convert, convert.cli\nprint(signal.getsignal(2) is signal.default_int_handler)\n")
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        check=False,
    )
    assert done.stdout == "True\n"


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "module", ["convert.core.system.process", "typer", "convert.cli.app", "yaml", "numpy", "tensorstore"]
)
def test_while_a_conversion_imports(module: str, number: signal.Signals, tmp_path: Path) -> None:
    assert_stopped(run(f"when_imported({module!r}, send)", number, conversion(tmp_path)), number)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("module", ["jax", "torch"])
def test_while_a_check_imports(module: str, tmp_path: Path) -> None:
    out, report = tmp_path / "out.safetensors", tmp_path / "report.xml"
    args = conversion(tmp_path, "--check")
    assert run(f"when_imported({module!r}, send)", signal.SIGINT, args).returncode == 130
    assert list(tmp_path.iterdir()) == [out]  # it was complete
    report.write_text("of an earlier check")
    args = ["check", out, "--from", checkpoint("timesfm-2.5"), "--junit", report]
    assert_stopped(run(f"when_imported({module!r}, send)", signal.SIGINT, args), signal.SIGINT)
    assert "KeyboardInterrupt" in report.read_text() or "SignalExit" in report.read_text()
    assert sorted(tmp_path.iterdir()) == [out, report]


@pytest.mark.slow
def test_what_swallows_exceptions_does_not_swallow_a_signal(tmp_path: Path) -> None:
    moment = """
def swallow():
    try:
        send()
    except BaseException:
        pass
when_imported("jax", swallow)
"""
    assert run(moment, signal.SIGINT, conversion(tmp_path, "--check", "--quiet")).returncode == 130


MOMENTS = {
    "temporary": "import os; before(os, 'posix_fallocate', send)",
    "first piece": "import convert.writing.execute as e; before(e.Write, 'piece', send)",
    "later piece": "import convert.writing.execute as e; before(e.Write, 'piece', send, 20)",
    "commit": "import convert.writing.writer as w; before(w.Writer, 'commit', send)",
    "endless piece": "import convert.writing.execute as e\n"
    "before(e.Write, 'piece', lambda: (send(), threading.Event().wait()))",
    "endless piece, twice": "import convert.writing.execute as e\n"
    "before(e.Write, 'piece', lambda: (send(), send(), threading.Event().wait()))",
    "endless C call": "import convert.writing.execute as e\n"
    "mutex = ctypes.create_string_buffer(64)\n"
    "def lock_twice():\n"
    "    threading.Thread(target=send).start()\n"
    "    lock = ctypes.CDLL(None).pthread_mutex_lock\n"
    "    lock(mutex), lock(mutex)\n"
    "before(e.Writer, 'region', lock_twice)",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"),
    [("out.safetensors", signal.SIGINT), pytest.param("out", signal.SIGTERM, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("moment", slow_but(["later piece", "commit"], MOMENTS))
def test_while_a_conversion_writes(moment: str, name: str, number: signal.Signals, tmp_path: Path) -> None:
    for jobs in (1, 3) if "piece" in moment else (1,):
        assert_stopped(run(MOMENTS[moment], number, conversion(tmp_path, "--jobs", jobs, "-q", name=name)), number)
        assert not list(tmp_path.iterdir())


CALLS = ["os.fsync", "os.rename", "os.replace", "os.link", "os.unlink", "shutil.rmtree"]


@pytest.mark.slow
@pytest.mark.parametrize("call", slow_but(["os.rename"], CALLS))
@pytest.mark.parametrize("exchange", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["out", pytest.param("out.safetensors", marks=pytest.mark.slow)])
def test_while_an_output_is_replaced(name: str, exchange: bool, call: str, tmp_path: Path) -> None:
    """The output is the old one or the new one, complete."""
    args = conversion(tmp_path, "--overwrite", "-q", name=name)
    assert run("", signal.SIGTERM, args).returncode == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    module, function = call.split(".")
    moment = f"import shutil\nbefore({module}, {function!r}, send)\n"
    if not exchange:
        moment += "import convert.core.system.file_calls as a; a.exchange = lambda *_: False\n"
    done = run(moment, signal.SIGTERM, args)
    assert done.returncode in (0, 143) and "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.slow
@pytest.mark.parametrize("number", slow_but([signal.SIGTERM], NUMBERS))
def test_an_ignored_signal_stays_ignored(number: signal.Signals, tmp_path: Path) -> None:
    """As under `nohup`, and in background jobs of a shell."""
    moment = MOMENTS["first piece"] + "\nwhen_imported('typer', send)"
    assert run(moment, number, conversion(tmp_path), ignored=[number]).returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("number", slow_but([signal.SIGTERM], NUMBERS))
def test_signals_that_are_not_ignored_work_beside_ignored_ones(number: signal.Signals, tmp_path: Path) -> None:
    others = [other for other in NUMBERS if other != number]
    assert_stopped(run(MOMENTS["later piece"], number, conversion(tmp_path), ignored=others), number)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_program_that_runs_the_command_keeps_its_handlers() -> None:
    code = """
import signal, sys
mine = lambda *_: None
signal.signal(signal.SIGTERM, mine)
sys.argv = ["convert", "--version"]
from convert.cli import main
try:
    main()
finally:
    assert signal.getsignal(signal.SIGTERM) is mine
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
