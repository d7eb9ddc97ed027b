"""Conversion against what people do today, and against the disk: paired runs, in alternation, each in a process of its own.

    python benchmarks/speed.py CKPT MODEL [--rounds 5] [--json results/NAME.json] [--plot results/NAME.svg]

Needs the test environment (orbax-checkpoint, JAX, torch); orbaxport takes part when it is installed. Each participant is timed
from the start of its process to its end; the memory is the largest RssAnon that was seen in 10 ms steps, which leaves out pages
of mapped files. The page cache is warm: each participant runs once before it counts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READ = """
import sys
from pathlib import Path
import tensorstore as ts
from convert.sources import open_source
from convert.sources.orbax_store import read_array
source = open_source(sys.argv[1])
for name in source.leaves:  # TensorStore reads and decodes; nothing of ours
    read_array(source._store, source._by_name[name], True)
"""
SCRIPT = """
import sys
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import save_file
tree = ocp.StandardCheckpointer().restore(sys.argv[1])
flat = {}
def walk(node, at):
    for key, value in node.items():
        if isinstance(value, dict):
            walk(value, [*at, key])
        else:
            array = np.asarray(value)
            if 'stacked' in '/'.join(at):
                for k in range(array.shape[0]):
                    part = array[k]
                    flat['.'.join([*at, key, str(k)])] = np.ascontiguousarray(part.T if part.ndim == 2 else part)
            else:
                flat['.'.join([*at, key])] = np.ascontiguousarray(array.T if array.ndim == 2 else array)
walk(tree, [])
save_file(flat, sys.argv[2])
"""
SAVE = """
import ml_dtypes  # so that NumPy knows bfloat16
import sys
from safetensors import safe_open
from safetensors.numpy import save_file
with safe_open(sys.argv[1], 'np') as file:
    tensors = {name: file.get_tensor(name) for name in file.keys()}
import time
started = time.perf_counter()
save_file(tensors, sys.argv[2])
print(time.perf_counter() - started)
"""


@dataclass
class Runs:
    """What one participant took.

    Attributes:
        seconds: wall time of each run. cpu: user and system time. anon: largest RssAnon, in bytes. curve: (second, RssAnon).
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    anon: list[int] = field(default_factory=list)
    curve: list[tuple[float, int]] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "seconds": round(statistics.median(self.seconds), 3),
            "all_seconds": [round(x, 3) for x in self.seconds],
            "cpu_seconds": round(statistics.median(self.cpu), 3),
            "rss_anon_mb": round(max(self.anon) / 1e6, 1),
        }


def measured(command: list[str], runs: Runs | None) -> str:
    """Runs a command, and watches its memory. Its standard output."""
    started = time.perf_counter()
    before = os.times()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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
        raise SystemExit(f"{' '.join(command[:3])} ...: exit code {process.returncode}\n{err[-2000:]}")
    if runs is not None:
        runs.seconds.append(took)
        runs.cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
        runs.anon.append(peak[0])
        runs.curve = curve
    return out


def participants(checkpoint: str, model: str, folder: Path, options: list[str]) -> dict[str, list[str]]:
    """Name -> command. `ready.safetensors` in the folder is a finished conversion."""
    python = [sys.executable, "-c"]
    convert = [sys.executable, "-m", "convert"]
    ready = str(folder / "ready.safetensors")
    found = {
        "TensorStore, read alone": [*python, READ, checkpoint],
        "convert": [*convert, model, checkpoint, str(folder / "ours.safetensors"), "--overwrite", *options],
        "script of a user": [*python, SCRIPT, checkpoint, str(folder / "script.safetensors")],
        "convert check: weights": [*convert, "check", ready, "--from", checkpoint, "--level", "weights"],
        "safetensors' save_file, of what is in memory": [*python, SAVE, ready, str(folder / "saved.safetensors")],
        "cp of the result": ["cp", ready, str(folder / "copy.safetensors")],
    }
    if shutil.which("orbaxport"):
        found["orbaxport"] = ["orbaxport", checkpoint, str(folder / "orbaxport")]
    return found


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="memory over time, as SVG")
    parser.add_argument("--options", default="", help="further options of convert, in one word")
    parser.add_argument("--only", nargs="*", help="participants whose names begin so")
    said = parser.parse_args()
    environment = machine()
    with tempfile.TemporaryDirectory(dir=Path(said.checkpoint).resolve().parent) as name:
        folder = Path(name)
        options = said.options.split()
        measured(
            [sys.executable, "-m", "convert", said.model, said.checkpoint, str(folder / "ready.safetensors"), *options],
            None,
        )
        commands = participants(said.checkpoint, said.model, folder, options)
        if said.only:
            commands = {k: v for k, v in commands.items() if any(k.startswith(only) for only in said.only)}
        runs = {name: Runs() for name in commands}
        for round_ in range(said.rounds + 1):
            for name, command in commands.items():
                out = measured(command, runs[name] if round_ else None)
                if name.startswith("safetensors") and round_:
                    runs[name].seconds[-1] = float(out)
        nbytes = (folder / "ready.safetensors").stat().st_size
    floor = runs.get("TensorStore, read alone")
    results: dict[str, Any] = {
        "machine": environment,
        "checkpoint": Path(said.checkpoint).name,
        "model": said.model,
        "bytes_written": nbytes,
    }
    results["runs"] = {name: found.summary() for name, found in runs.items()}
    print(f"{Path(said.checkpoint).name}, {nbytes / 1e9:.2f} GB written; medians of {said.rounds} rounds\n")
    print(f"| {'':44s} | seconds | ratio to reading | processor s | RssAnon MB |\n|---|---|---|---|---|")
    for name, found in runs.items():
        ratios = [a / b for a, b in zip(found.seconds, floor.seconds, strict=True)] if floor else []
        if ratios:
            results["runs"][name]["ratio_to_read"] = round(statistics.median(ratios), 3)
        s = results["runs"][name]
        print(
            f"| {name:44s} | {s['seconds']:7.2f} | {s.get('ratio_to_read', 0):.2f} | {s['cpu_seconds']:.2f} | {s['rss_anon_mb']:.0f} |"
        )
    if said.json:
        said.json.parent.mkdir(parents=True, exist_ok=True)
        said.json.write_text(json.dumps(results, indent=1) + "\n")
    if said.plot:
        said.plot.write_text(plot({name: found.curve for name, found in runs.items()}))


COLOURS = ("#1a7f37", "#cf222e", "#0969da", "#bf8700", "#8250df", "#57606a", "#d4a72c")


def plot(curves: dict[str, list[tuple[float, int]]]) -> str:
    """RssAnon over time of the last run of each, as SVG."""
    width, height, left, top = 640, 320, 60, 20
    longest = max((curve[-1][0] for curve in curves.values() if curve), default=1.0)
    most = max((n for curve in curves.values() for _, n in curve), default=1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + left + 20} {height + 150}" font-family="sans-serif" font-size="12">'
    ]
    for k in range(5):
        y = top + height - height * k / 4
        lines.append(
            f'<path d="M{left} {y:.0f}H{left + width}" stroke="#ddd"/><text x="{left - 6}" y="{y + 4:.0f}" text-anchor="end">{most * k / 4e9:.1f} GB</text>'
        )
        lines.append(
            f'<text x="{left + width * k / 4:.0f}" y="{top + height + 16}" text-anchor="middle">{longest * k / 4:.1f} s</text>'
        )
    for k, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{left + width * t / longest:.1f},{top + height - height * n / most:.1f}" for t, n in curve)
        colour = COLOURS[k % len(COLOURS)]
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{left}" y="{top + height + 40 + 15 * k}" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    main()
