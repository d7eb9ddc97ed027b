"""Measures what Ray costs on one machine: `--engine local` and `--engine ray` on the same checkpoint, in alternation.

    python benchmarks/engines.py CKPT MODEL FOLDER [--rounds 2] [--max-shard-size 250MB] [--json results/engines.json]

The outputs must have the same bytes. The seconds of Ray hold its start and its end on this machine; `inside` is what the conversion itself took.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import statistics
import sys
from pathlib import Path

from measuring import alternate, machine, measure, summaries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-shard-size", default="250MB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    outs = {engine: options.folder / f"out-{engine}" for engine in ("local", "ray")}
    start = [sys.executable, "-m", "convert", options.model, str(options.checkpoint)]
    end = ["--max-shard-size", options.max_shard_size, "--json", "--engine"]
    commands = {engine: [*start, str(out), *end, engine] for engine, out in outs.items()}
    runs = alternate(commands, options.rounds, outs.values())
    for command in commands.values():
        measure(command, None)
    names = sorted(path.name for path in outs["local"].iterdir())
    same = filecmp.cmpfiles(outs["local"], outs["ray"], names, shallow=False)[0]
    if sorted(same) != names:
        raise SystemExit(f"other bytes: {sorted(set(names) - set(same))}")
    printed = {engine: [json.loads(text) for text in taken.output] for engine, taken in runs.items()}
    result = {
        "machine": machine(),
        "bytes": printed["ray"][0]["bytes"],
        "files": len(names),
        "same_bytes": True,
        "runs": summaries(runs, ""),
        "inside": {name: round(statistics.median(one["seconds"] for one in made), 2) for name, made in printed.items()},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
