"""Compares the conversion with other ways to convert, and with the disk: alternating runs, each in its own process.

    python benchmarks/speed.py CKPT MODEL [--rounds 5] [--json results/NAME.json] [--memory results/MEMORY.svg] [--times results/TIMES.svg]

Needs the test environment (orbax-checkpoint, JAX, torch). Participants are those of `peers.py`, and orbaxport when it is
installed; the steps of Hugging Face's script when the checkpoint is of Gemma 3 in the flat layout. Each is timed
from the start of its process to its end; the memory is the largest RssAnon that was seen in 10 ms steps, which leaves out pages
of mapped files. The page cache is warm: each participant runs once before it counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import alternate, machine, measure, summaries
from plots import bars, curves

READING = "TensorStore, read alone, all cores"  # the floor
HUGGING_FACE = "steps of Hugging Face's script"
SAVING = "safetensors' save_file, of what is in memory"


def participants(checkpoint: str, model: str, folder: Path, options: list[str]) -> dict[str, list[str]]:
    """Name -> command. `ready.safetensors` in the folder is a finished conversion."""
    peer = [sys.executable, str(Path(__file__).with_name("peers.py"))]
    convert = [sys.executable, "-m", "convert"]
    ready = str(folder / "ready.safetensors")
    commands = {
        READING: [*peer, "read", checkpoint, str(len(os.sched_getaffinity(0)))],
        "TensorStore, read alone, leaf by leaf": [*peer, "read", checkpoint],
        "convert": [*convert, model, checkpoint, str(folder / "ours.safetensors"), "--overwrite", *options],
        "script of a user": [*peer, "script", checkpoint, str(folder / "script.safetensors")],
    }
    if importlib.util.find_spec("orbaxport"):  # without a key map for this layout: it moves tensors and transposes none
        out = str(folder / "orbaxport.safetensors")
        commands["orbaxport"] = [sys.executable, "-m", "orbaxport", "--input", checkpoint, "--output", out, "--quiet"]
    metadata = Path(checkpoint) / "_METADATA"
    if metadata.exists() and "transformer/layer_0/attn/q_einsum" in metadata.read_text():
        commands[HUGGING_FACE] = [*peer, "huggingface", checkpoint, str(folder / "huggingface")]
    for levels in ("weights", "coverage,weights", "coverage,weights,layers"):
        command = [*convert, "check", ready, "--from", checkpoint, "--level", levels, *options]
        commands[f"convert check: {levels.replace(',', ', ')}"] = command
    commands[SAVING] = [*peer, "save", ready, str(folder / "saved.safetensors")]
    commands["cp of the result"] = ["cp", ready, str(folder / "copy.safetensors")]
    return commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--memory", type=Path, help="memory over time, as SVG")
    parser.add_argument("--times", type=Path, help="medians as bars, as SVG")
    parser.add_argument("--options", default="", help="further options of convert, in one word")
    parser.add_argument("--only", nargs="*", help="participants whose names begin so")
    arguments = parser.parse_args()
    environment = machine()
    with tempfile.TemporaryDirectory(dir=Path(arguments.checkpoint).resolve().parent) as name:
        folder = Path(name)
        options = arguments.options.split()
        measure(
            [
                sys.executable,
                "-m",
                "convert",
                arguments.model,
                arguments.checkpoint,
                str(folder / "ready.safetensors"),
                *options,
            ],
            None,
        )
        commands = participants(arguments.checkpoint, arguments.model, folder, options)
        if arguments.only:
            commands = {k: v for k, v in commands.items() if any(k.startswith(only) for only in arguments.only)}
        written = {Path(word) for command in commands.values() for word in command if Path(word).parent == folder}
        runs = alternate(commands, arguments.rounds, written - {folder / "ready.safetensors"})
        if SAVING in runs:
            runs[SAVING].seconds = [float(out) for out in runs[SAVING].output]  # of the call alone
        nbytes = (folder / "ready.safetensors").stat().st_size
    results: dict[str, Any] = {
        "machine": environment,
        "checkpoint": Path(arguments.checkpoint).name,
        "model": arguments.model,
        "bytes_written": nbytes,
    }
    results["left_out"] = sorted({"orbaxport", HUGGING_FACE} - set(commands))
    results["runs"] = summaries(runs, READING)
    print(f"{Path(arguments.checkpoint).name}, {nbytes / 1e9:.2f} GB written; medians of {arguments.rounds} rounds\n")
    print(f"| {'':44s} | seconds | ratio to reading | processor s | RssAnon MB |\n|---|---|---|---|---|")
    for name, s in results["runs"].items():
        print(
            f"| {name:44s} | {s['seconds']:7.2f} | {s.get('ratio_to_read', 0):.2f} | {s['cpu_seconds']:.2f} | {s['rss_anon_mb']:.0f} |"
        )
    for name in results["left_out"]:
        print(f"left out, as it is not installed or the checkpoint is of another layout: {name}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    conversions = [name for name in runs if not name.startswith(("convert check", "safetensors", "cp "))]
    if arguments.memory:
        drawn = {name: [(t, n / 1e9) for t, n in runs[name].curve] for name in conversions}
        arguments.memory.write_text(curves(drawn, "s", "GB of anonymous memory"))
    if arguments.times:
        title = f"{Path(arguments.checkpoint).name}, {nbytes / 1e9:.1f} GB: seconds, and anonymous memory"
        arguments.times.write_text(
            bars(
                title,
                {
                    name: (results["runs"][name]["seconds"], f"{results['runs'][name]['rss_anon_mb'] / 1e3:.2f} GB")
                    for name in conversions
                },
            )
        )


if __name__ == "__main__":
    main()
