"""Run tasks on Ray: it chooses the machines by processors and memory, and starts a task again whose machine is lost."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from convert.cluster.tasks import Done, Request, Task, run_task
from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.core.system import signals

RETRIES = 3  # Ray's own default for a task whose worker or machine is lost
_ANSWER = 10.0  # seconds in which the head must answer
_TICK = 0.5  # seconds between two looks for signals
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def failed(problem: str, fix: str, path: str = "") -> ConvertError:
    """Return the error for a cluster that cannot do the work."""
    return ConvertError(Finding("cluster-failed", problem, path=path, fix=fix))


@contextmanager
def connected(address: str | None) -> Iterator[RayCluster]:
    """Connect to a cluster; disconnect at the end.

    Args:
        address: ``HOST:PORT`` of the head, or ``auto``; None starts Ray on this machine and ends it afterwards.

    Raises:
        ConvertError: Ray is not installed (``package-missing``), or no cluster answers (``cluster-failed``).
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        fix = "run pip install 'ckpt-convert[ray]'"
        raise ConvertError(Finding("package-missing", "Ray is not installed", path="--engine ray", fix=fix)) from None
    _require_answer(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        ray.init(
            address=address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as error:  # noqa: BLE001 - Ray raises errors of many kinds
        where = f"no cluster answers at {address}" if address else "Ray does not start on this machine"
        first = next(iter(str(error).splitlines()), "")
        fix = "start one with `ray start --head`, and give its address" if address else "see `ray status`"
        raise failed(f"{where}: {type(error).__name__}: {first}", fix, "--address" if address else "") from None
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray's would end the program without removing what is unfinished
                signal.signal(number, handler)
        yield RayCluster(ray)
    finally:
        ray.shutdown()


def _require_answer(address: str | None) -> None:
    """Check that something listens at an address: Ray itself tries for minutes, and prints what it tries.

    Raises:
        ConvertError: nothing does.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal() or "://" in host:
        return  # `auto`, or what Ray alone understands
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER).close()
    except (OSError, OverflowError) as error:
        problem = f"no cluster answers at {address}: {error}"
        raise failed(problem, "start one with `ray start --head`, and give its address", "--address") from None


class RayCluster:
    """A cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def threads(self, wanted: int | None) -> int:
        """Return the threads of a task: as many as are wanted, or up to 4 that every machine with processors has."""
        processors = [int(node.get("CPU", 0)) for node in self._nodes()]
        return wanted or max(1, min([4, *filter(None, processors)]))

    def _nodes(self) -> list[Mapping[str, float]]:
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def run(self, request: Request, tasks: Sequence[Task]) -> Iterator[Done]:
        """Run the tasks and yield what each has done, in the order of their ends.

        Raises:
            ConvertError: no machine has the processors or the memory for a task, or Ray gave one up.
        """
        ray = self._ray
        largest = max(task.memory for task in tasks)
        nodes = self._nodes()
        if not any(node.get("CPU", 0) >= request.threads and node.get("memory", 0) >= largest for node in nodes):
            has = "; ".join(
                f"{node.get('CPU', 0):.0f} processors and {node.get('memory', 0):,.0f} bytes" for node in nodes
            )
            raise failed(
                f"no machine has {request.threads} processors and {largest:,} bytes for a task: the cluster has {has}",
                "give a smaller --jobs or --max-shard-size, or larger machines",
            )
        shared = ray.put(request)
        remote = ray.remote(num_cpus=request.threads, max_retries=RETRIES)(run_task)
        pending = {remote.options(memory=task.memory, name=task.file).remote(shared, task): task for task in tasks}
        try:
            while pending:
                signals.check()
                ready, _ = ray.wait(list(pending), timeout=_TICK)
                for reference in ready:
                    task = pending.pop(reference)
                    yield self._result(reference, task)
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)

    def _result(self, reference: Any, task: Task) -> Done:
        try:
            done: Done = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:  # a mistake in this program, which another try would repeat
            raise
        except self._ray.exceptions.RayError as error:
            first = next(iter(str(error).splitlines()), "")
            problem = f"the task was given up after {RETRIES} retries: {type(error).__name__}: {first}"
            raise failed(problem, "see Ray's logs, and continue with --resume", task.file) from None
        return done
