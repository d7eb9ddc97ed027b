"""Runs all measurements of this folder, and writes their results and figures.

    python benchmarks/run.py FOLDER [--rounds 5] [--results benchmarks/results]

Makes the checkpoints in FOLDER that are not there yet (15 GB in all, as much memory as the largest takes on disk, 6 GB) and leaves them. About
an hour; nothing else should run.
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
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    asked.results.mkdir(parents=True, exist_ok=True)

    def python(script: Path, *arguments: object) -> None:
        print("+", script.name, *arguments, flush=True)
        subprocess.run([sys.executable, str(script), *map(str, arguments)], check=True)

    timesfm, gemma = asked.folder / "timesfm-2.5-200m", asked.folder / "gemma-3-1b"
    if not timesfm.exists():
        python(TIMESFM, "--size", "real", timesfm)
    if not gemma.exists():
        python(HERE / "checkpoints.py", gemma, "--layout", "flat")  # which Hugging Face's script is for
    rounds = ("--rounds", asked.rounds)
    figures = ("--times", asked.results / "times.svg", "--memory", asked.results / "memory.svg")
    python(HERE / "speed.py", timesfm, "timesfm", *rounds, "--json", asked.results / "timesfm-2.5-200m.json")
    python(HERE / "speed.py", gemma, "gemma", *rounds, "--json", asked.results / "gemma-3-1b.json", *figures)
    series = ("--json", asked.results / "series.json", "--plot", asked.results / "series.svg")
    python(HERE / "series.py", asked.folder, *rounds, "--keep", *series)
    python(HERE / "start.py", asked.folder, *rounds, "--json", asked.results / "start.json")


if __name__ == "__main__":
    main()
