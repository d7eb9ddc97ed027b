"""Runs a command as a process and measures its wall time, processor time and memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Runs:
    """The measurements of one participant.

    Attributes:
        seconds: wall time of each run.
        cpu: user and system time of each run.
        anon: largest RssAnon of each run, in bytes.
        output: standard output of each run.
        curve: (second, RssAnon) of the last run.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    anon: list[int] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    curve: list[tuple[float, int]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "seconds": round(statistics.median(self.seconds), 3),
            "all_seconds": [round(x, 3) for x in self.seconds],
            "cpu_seconds": round(statistics.median(self.cpu), 3),
            "rss_anon_mb": round(max(self.anon) / 1e6, 1),
        }


def measure(command: list[str], runs: Runs | None) -> None:
    """Run a command and add its measurements to `runs`; None measures nothing."""
    started = time.perf_counter()
    before = os.times()
    # Use compiled bytecode, as pip installs it.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    peak, curve, done = [0], [], threading.Event()

    def watch() -> None:
        status = Path(f"/proc/{process.pid}/status")
        while not done.wait(0.01):
            try:
                line = next((x for x in status.read_text().splitlines() if x.startswith("RssAnon")), None)
            except OSError:
                return
            if line is not None:
                now = int(line.split()[1]) << 10
                peak[0] = max(peak[0], now)
                curve.append((round(time.perf_counter() - started, 3), now))

    thread = threading.Thread(target=watch)
    thread.start()
    out, err = process.communicate()
    done.set()
    thread.join()
    took = time.perf_counter() - started
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:3])} ...: exit code {process.returncode}\n{err}")
    if runs is not None:
        runs.seconds.append(took)
        runs.cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
        runs.anon.append(peak[0])
        runs.output.append(out)
        runs.curve = curve


def machine() -> dict[str, Any]:
    packages = ("tensorstore", "numpy", "safetensors", "zstandard", "orbax-checkpoint", "jax", "orbaxport")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "processor": model,
        "processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
        **versions,
    }


def alternate(commands: Mapping[str, list[str]], rounds: int, outputs: Iterable[Path] = ()) -> dict[str, Runs]:
    """Run each command once in each round, after one round that warms the page cache and is not measured.

    Args:
        outputs: the files that the commands write. They are removed after each command, and the disk is given time to settle:
            else a command that syncs its output also waits for the writes of the commands before it.
    """
    runs, outputs = {name: Runs() for name in commands}, tuple(outputs)
    for round_ in range(rounds + 1):
        for name, command in commands.items():
            measure(command, runs[name] if round_ else None)
            present = [out for out in outputs if out.exists()]
            for out in present:
                shutil.rmtree(out) if out.is_dir() else out.unlink()
            if present:
                settle(present[0].parent)
    return runs


def settle(folder: Path, quick: float = 0.02, most: float = 60) -> None:
    """Wait until a small file in `folder` is synced in less than `quick` seconds, three times in a row, at most `most` seconds.

    A file system with the mount option ``discard`` reports removed blocks to the disk, and the next sync waits for it.
    """
    os.sync()
    until, in_a_row, probe = time.monotonic() + most, 0, folder / "settle"
    while in_a_row < 3 and time.monotonic() < until:
        started = time.perf_counter()
        with probe.open("wb") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        in_a_row = in_a_row + 1 if time.perf_counter() - started < quick else 0
        time.sleep(0.1)
    probe.unlink()


def summaries(runs: Mapping[str, Runs], floor: str) -> dict[str, dict[str, Any]]:
    """Return the medians by name, and the median of the ratios to the command `floor` of the same round, if it was run."""
    result = {name: taken.summary() for name, taken in runs.items()}
    for name, taken in runs.items() if floor in runs else ():
        ratios = [a / b for a, b in zip(taken.seconds, runs[floor].seconds, strict=True)]
        result[name]["ratio_to_read"] = round(statistics.median(ratios), 3)
    return result
