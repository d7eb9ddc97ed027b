"""Runs all measurements of this folder and writes their results and figures.

    python benchmarks/run.py FOLDER [--rounds 5] [--results benchmarks/results]

Makes the missing checkpoints in FOLDER (15 GB in all; needs as much memory as the largest takes on disk, 6 GB) and keeps
them. Takes about an hour; run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TIMESFM = HERE.parent / "tests" / "golden" / "make_timesfm_2p5.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.results.mkdir(parents=True, exist_ok=True)

    def python(script: Path, *arguments: object) -> None:
        print("+", script.name, *arguments, flush=True)
        subprocess.run([sys.executable, str(script), *map(str, arguments)], check=True)

    timesfm, gemma = options.folder / "timesfm-2.5-200m", options.folder / "gemma-3-1b"
    if not timesfm.exists():
        python(TIMESFM, "--size", "real", timesfm)
    if not gemma.exists():
        python(HERE / "checkpoints.py", gemma, "--layout", "flat")  # the layout of Hugging Face's script
    rounds = ("--rounds", options.rounds)
    figures = ("--times", options.results / "times.svg", "--memory", options.results / "memory.svg")
    python(HERE / "speed.py", timesfm, "timesfm", *rounds, "--json", options.results / "timesfm-2.5-200m.json")
    python(HERE / "speed.py", gemma, "gemma", *rounds, "--json", options.results / "gemma-3-1b.json", *figures)
    python(HERE / "both_ways.py", gemma, "gemma", *rounds, "--json", options.results / "both-ways.json")
    series = ("--json", options.results / "series.json", "--plot", options.results / "series.svg")
    python(HERE / "series.py", options.folder, *rounds, "--keep", *series)
    python(HERE / "start.py", options.folder, *rounds, "--json", options.results / "start.json")
    python(HERE / "infer.py", options.folder / "infer", *rounds, "--json", options.results / "infer.json")


if __name__ == "__main__":
    main()
