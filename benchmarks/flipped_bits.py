"""Flips single bits of a large output: `convert verify` must find each, and `convert diff` must name the tensor.

    python benchmarks/flipped_bits.py CKPT MODEL FOLDER [--flips 40] [--diffs 4] [--max-shard-size SIZE] [--json results/flipped-bits.json]

Converts CKPT into FOLDER (twice its size on the disk). The bits are one in each of `--flips` equal parts of the output, and the first and last bit of
every header and of every file's data. Each is flipped alone, verified, and flipped back. `convert diff` compares with an untouched copy: one flip alone for each of `--diffs`
runs, and all flips of tensors at once. Ends with an error at the first flip that is not found, or that is found in another place.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import machine

CONVERT = (sys.executable, "-m", "convert")


@dataclass(frozen=True)
class Flip:
    """One bit of a file, and the tensor that it belongs to; empty in a header."""

    file: Path
    bit: int
    tensor: str


def files_of(out: Path) -> list[Path]:
    return sorted(out.glob("*.safetensors")) if out.is_dir() else [out]


def begin_of(file: Path) -> int:
    """Return where the data of a file begins."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def tensor_at(file: Path, byte: int) -> str:
    """Return the tensor that holds a byte, from the header alone."""
    begin = begin_of(file)
    with file.open("rb") as opened:
        opened.seek(8)
        header = json.loads(opened.read(begin - 8))
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] <= byte - begin < entry["data_offsets"][1]:
            return str(name)
    return ""


def draw(out: Path, count: int, seed: int = 0) -> Iterator[Flip]:
    """Yield the bits: spread over the output, and at the edges of headers and data."""
    chosen, files = random.Random(seed), files_of(out)
    total, before = sum(file.stat().st_size for file in files), 0
    places = [(total * k // count + chosen.randrange(total // count)) * 8 + chosen.randrange(8) for k in range(count)]
    for file in files:
        size, begin = file.stat().st_size, begin_of(file)
        inside = [bit - 8 * before for bit in places if before <= bit // 8 < before + size]
        for bit in (*inside, 0, 8 * begin - 1, 8 * begin, 8 * size - 1):
            yield Flip(file, bit, tensor_at(file, bit // 8))
        before += size


@contextmanager
def flipped(*flips: Flip) -> Iterator[None]:
    def turn() -> None:
        for flip in flips:
            with flip.file.open("r+b") as file:
                file.seek(flip.bit // 8)
                (byte,) = file.read(1)
                file.seek(flip.bit // 8)
                file.write(bytes([byte ^ 1 << flip.bit % 8]))

    turn()
    try:
        yield
    finally:
        turn()


def run(*arguments: object) -> tuple[int, dict[str, Any], float]:
    """Run a command; return its exit code, its JSON and its seconds."""
    started = time.perf_counter()
    done = subprocess.run([*CONVERT, *map(str, arguments), "--json"], capture_output=True, text=True, check=False)
    try:
        printed = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"{arguments}: exit code {done.returncode}\n{done.stderr}") from None
    return done.returncode, printed, time.perf_counter() - started


def require(holds: bool, *what: object) -> None:
    if not holds:
        raise SystemExit(" ".join(("not found:", *map(str, what))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flips", type=int, default=40)
    parser.add_argument("--diffs", type=int, default=4)
    parser.add_argument("--max-shard-size")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sharded = ("--max-shard-size", options.max_shard_size) if options.max_shard_size else ()
    out = options.folder / ("flipped" if sharded else "flipped.safetensors")
    copy = options.folder / f"untouched-{out.name}"
    run(options.model, options.checkpoint, out, "--overwrite", *sharded)
    (shutil.copytree if out.is_dir() else shutil.copy)(out, copy)
    flips = list(draw(out, options.flips))
    verified, compared = [], []
    for flip in flips:
        with flipped(flip):
            code, found, seconds = run("verify", out)
        verified.append(seconds)
        first, *others = [finding["data"] for finding in found["findings"]] or [{}]
        there = (first.get("file"), first.get("tensor", "")) == (flip.file.name, flip.tensor)
        require(code == 1 and there and not (flip.tensor and others), flip, found["findings"])
    in_tensors = [flip for flip in flips if flip.tensor]
    for flip in in_tensors[:: max(1, len(in_tensors) // options.diffs)][: options.diffs]:
        with flipped(flip):
            code, found, seconds = run("diff", out, copy)
        compared.append(seconds)
        named = [(tensor["name"], tensor["count"]) for tensor in found["differing"]]
        require(code == 1 and named == [(flip.tensor, 1)], flip, named)
    with flipped(*in_tensors):
        code, found, _ = run("diff", out, copy)
    require({tensor["name"] for tensor in found["differing"]} == {flip.tensor for flip in in_tensors}, "all at once")
    code, found, seconds = run("verify", out)
    require(code == 0 and found["intact"], "the output after all flips were taken back")
    result = {
        "machine": machine(),
        "bytes": sum(file.stat().st_size for file in files_of(out)),
        "files": len(files_of(out)),
        "flips": {"tensors": len(in_tensors), "headers": len(flips) - len(in_tensors)},
        "found_by_verify": len(verified),
        "named_by_diff": {"alone": len(compared), "at_once": len(in_tensors)},
        "median_seconds": {
            "verify": round(sorted(verified)[len(verified) // 2], 2),
            "diff": round(sorted(compared)[len(compared) // 2], 2),
        },
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for path in (out, copy):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main()
