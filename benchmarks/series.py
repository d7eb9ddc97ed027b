"""Measures time and memory over the size of a checkpoint and the number of threads.

    python benchmarks/series.py FOLDER [--sizes 270m 1b:8 1b 4b:10 4b] [--rounds 3] [--json results/series.json] [--plot results/series.svg]

Writes a Gemma 3 checkpoint of each size into FOLDER by `checkpoints.py` unless it is there (`1b:8` is eight layers of the 1B shape),
converts it in alternation with reading alone, once per number of threads, and removes it unless `--keep` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import alternate, machine, measure, summaries
from plots import curves

READING = "TensorStore, read alone, all cores"
SIZES = ["270m", "1b:8", "1b", "4b:10", "4b"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "sizes": {}}
    for size in options.sizes:
        results["sizes"][size] = medians = one(options.folder, size, options.rounds, options.keep)
        print(size, json.dumps(medians), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot:
        lines: dict[str, list[tuple[float, float]]] = {}
        for medians in results["sizes"].values():
            for name, run in medians["runs"].items():
                lines.setdefault(f"{name}: seconds", []).append((medians["bytes_written"] / 1e9, run["seconds"]))
                lines.setdefault(f"{name}: GB of anonymous memory", []).append(
                    (medians["bytes_written"] / 1e9, run["rss_anon_mb"] / 1e3)
                )
        options.plot.write_text(curves(lines, "GB", "seconds, or GB of anonymous memory"))


def one(folder: Path, size: str, rounds: int, keep: bool) -> dict[str, Any]:
    """Measure one checkpoint; return the medians by participant."""
    checkpoint, out = folder / f"gemma-{size.replace(':', '-')}", folder / "series.safetensors"
    here = Path(__file__)
    if not checkpoint.exists():
        name, _, layers = size.partition(":")
        command = [sys.executable, str(here.with_name("checkpoints.py")), str(checkpoint), "--size", name]
        subprocess.run([*command, *(["--layers", layers] if layers else [])], check=True)
    threads = len(os.sched_getaffinity(0))
    convert = [sys.executable, "-m", "convert", "gemma", str(checkpoint), str(out), "--overwrite", "--jobs"]
    peer = [sys.executable, str(here.with_name("peers.py")), "read", str(checkpoint)]
    commands = {READING: [*peer, str(threads)], "TensorStore, read alone, leaf by leaf": peer}
    commands |= {
        f"convert --jobs {k}": [*convert, str(k)] for k in sorted({1, 2, 4, 8, threads} & set(range(threads + 1)))
    }
    measure(commands["convert --jobs 1"], None)
    nbytes = out.stat().st_size
    out.unlink()
    runs = alternate(commands, rounds, [out])
    if not keep:
        shutil.rmtree(checkpoint)
    return {"bytes_written": nbytes, "runs": summaries(runs, READING)}


if __name__ == "__main__":
    main()
