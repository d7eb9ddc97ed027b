"""Run the jobs, each as a process of its own."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from convert.batch.jobs import Job, command
from convert.batch.preflight import Planned
from convert.core.system import signals
from convert.core.system.process import PROGRESS_FD
from convert.core.text import one_line
from convert.writing.transfer import default_jobs

_GRACE = 5.0  # seconds that a job gets to remove what is unfinished
_TICK = 0.1  # seconds between two looks for signals


class Status(StrEnum):
    """What became of a job."""

    CONVERTED = "converted"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
        job: the job.
        status: whether it was converted, and its check passed.
        seconds: time of the conversion and the check.
        command: what reproduces a failure; empty without one.
        error: text of the failure, one line.
        tensors, nbytes: what was written.
        restored: number of tensors that an earlier run had written.
        source_digest: checksum of the leaves that were read.
        levels: level of the check -> verdict.
    """

    job: Job
    status: Status
    seconds: float = 0.0
    command: str = ""
    error: str = ""
    tensors: int = 0
    nbytes: int = 0
    restored: int = 0
    source_digest: str = ""
    levels: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "out": str(self.job.out),
            "model": self.job.model,
            "checkpoint": str(self.job.checkpoint),
            "at": self.job.at,
            "status": str(self.status),
            "seconds": round(self.seconds, 3),
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "restored": self.restored,
            "source_digest": self.source_digest,
            "check": self.levels,
            "error": self.error,
            "command": self.command,
        }


@dataclass(frozen=True)
class Progress:
    """A job has started (`done` is 0), or has read `done` of `total` bytes; `phase` is ``convert`` or ``check``."""

    job: Job
    phase: str
    done: int
    total: int


Event = Progress | Outcome


def run_jobs(
    planned: Sequence[Planned],
    *,
    jobs: int,
    keep_going: bool,
    extra: Sequence[str] = (),
    on_event: Callable[[Event], None],
) -> list[Outcome]:
    """Run the jobs and return an outcome for each, in their order.

    Args:
        jobs: how many run at a time.
        keep_going: whether the others start after one has failed; those that run are finished in any case.
        extra: options that every conversion gets.
        on_event: called in the thread of the caller.

    Raises:
        SignalExit: a signal ends the program; the running jobs were ended first.
    """
    events: queue.Queue[Event] = queue.Queue()
    runner = _Runner(events, max(1, default_jobs() // jobs), extra)
    outcomes: dict[int, Outcome] = {}
    stop = threading.Event()

    def work(k: int) -> None:
        outcome = Outcome(planned[k].job, Status.NOT_RUN) if stop.is_set() else runner.run(planned[k])
        if outcome.status is Status.FAILED and not keep_going:
            stop.set()
        outcomes[k] = outcome
        events.put(outcome)

    pool = ThreadPoolExecutor(jobs, thread_name_prefix="batch")
    try:
        with signals.cleanup(runner.end_all):
            futures = [pool.submit(work, k) for k in range(len(planned))]
            left = len(planned)
            while left:
                signals.check()
                for future in futures:
                    if future.done() and (error := future.exception()) is not None:
                        raise error
                with suppress(queue.Empty):
                    event = events.get(timeout=_TICK)
                    left -= isinstance(event, Outcome)
                    on_event(event)
    finally:
        stop.set()
        runner.end_all()
        pool.shutdown(wait=True, cancel_futures=True)
    return [outcomes[k] for k in range(len(planned))]


class _Runner:
    """Starts the processes, and ends those that run when the batch ends."""

    def __init__(self, events: queue.Queue[Event], threads: int, extra: Sequence[str]) -> None:
        self._events, self._threads, self._extra = events, threads, extra
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ended = False

    def run(self, planned: Planned) -> Outcome:
        """Convert, and check where the job asks for it."""
        started, job = time.monotonic(), planned.job
        arguments = job.convert_arguments(self._extra)
        self._events.put(Progress(job, "convert", 0, 0))
        code, printed, error = self._process(job, [*arguments, "--jobs", str(self._threads)])
        failed, levels = arguments if code else None, {}
        if not code and job.levels:
            self._events.put(Progress(job, "check", 0, 0))
            code, checked, error = self._process(job, job.check_arguments())
            levels = {level["level"]: level["verdict"] for level in checked.get("levels", ())}
            failed = job.check_arguments() if code else None
            error = error or _verdicts(levels)
        return Outcome(
            job,
            Status.CONVERTED if failed is None else Status.FAILED,
            time.monotonic() - started,
            command(failed) if failed else "",
            error if failed else "",
            printed.get("tensors", 0),
            printed.get("bytes", 0),
            printed.get("restored", 0),
            printed.get("source", {}).get("digest", ""),
            levels,
        )

    def _process(self, job: Job, arguments: Sequence[str]) -> tuple[int, dict[str, Any], str]:
        """Run a command; return its exit code, its JSON, and why it failed."""
        reading, writing = os.pipe()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, os.fdopen(reading, "rb") as progress:
            try:
                with self._lock:
                    if self._ended:
                        return 1, {}, "not started: the batch was ended"
                    process = subprocess.Popen(
                        [sys.executable, "-m", "convert", *arguments, "--json"],
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=err,
                        pass_fds=(writing,),
                        env={**os.environ, PROGRESS_FD: str(writing)},
                    )
                    self._running.add(process)
            finally:
                os.close(writing)
            for line in progress:
                done, _, total = line.decode().partition(" ")
                self._events.put(Progress(job, "convert", int(done), int(total)))
            code = process.wait()
            with self._lock:
                self._running.discard(process)
            out.seek(0), err.seek(0)
            try:
                printed = json.loads(out.read() or b"{}")
            except ValueError:
                printed = {}
            return code, printed, _reason(code, err.read().decode(errors="replace")) if code else ""

    def end_all(self) -> None:
        """End the running processes, and start no more. They remove what is unfinished."""
        with self._lock:
            self._ended, running = True, list(self._running)
        for process in running:
            with suppress(OSError):
                process.terminate()
        for process in running:
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()


def _reason(code: int, printed: str) -> str:
    """Return one line on why a command failed: its error, or the signal that ended it."""
    lines = [line for line in printed.splitlines() if line.strip()]
    start = next((k for k, line in enumerate(lines) if line.startswith("error")), None)
    if start is not None:
        return one_line(" ".join(line.strip() for line in lines[start : start + 2]))
    if code < 0:
        why = "; the system may have run out of memory" if -code == signal.SIGKILL else ""
        return f"ended by {signal.Signals(-code).name}{why}"
    return one_line(lines[-1]) if lines else ""


def _verdicts(levels: dict[str, str]) -> str:
    return "the check did not pass: " + ", ".join(f"{level} {verdict}" for level, verdict in levels.items())
