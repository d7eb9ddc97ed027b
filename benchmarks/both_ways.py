"""Measures what leaves no safetensors file, or starts from one: `load_into` a module, and `--to orbax`.

    python benchmarks/both_ways.py CKPT MODEL [--rounds 4] [--json RESULT]

Each participant is a process of its own, in alternation; the seconds are those of the call alone, without imports. `bounds` of the
result has what must hold, with the ratios of each round. CKPT of the size of Gemma 3 1B: `python benchmarks/checkpoints.py CKPT`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measuring import Runs, alternate, machine

WHAT = {
    "read": "TensorStore reads all leaves on all cores, no write",
    "module": "the module alone, its memory touched",
    "load_file": "safetensors.torch.load_file of the converted file, then load_state_dict into the module",
    "load_into": "convert.load_into of the checkpoint",
    "tensorstore": "read the file, write the same bytes with TensorStore: OCDBT, zarr, zstd",
    "back": "convert --to orbax",
    "script": "load_file, NumPy transposes, StandardCheckpointer.save",
}


def one(name: str, checkpoint: str, model: str, file: str, out: str) -> None:
    """Run one participant; print its seconds."""
    from safetensors import safe_open

    if name in ("module", "load_file", "load_into"):
        import torch
        from safetensors.torch import load_file

        import convert

        module = torch.nn.Module()
        with safe_open(file, "pt") as held:
            for key in held.keys():  # noqa: SIM118 - not a dict
                part, (*path, last) = module, key.split(".")
                for step in path:
                    if step not in part._modules:
                        part.add_module(step, torch.nn.Module())
                    part = part.get_submodule(step)
                shape = held.get_slice(key).get_shape()
                part.register_parameter(last, torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), False))
        for parameter in module.parameters():
            parameter.data.fill_(1)
        started = time.perf_counter()
        if name == "load_file":
            module.load_state_dict(load_file(file))
        elif name == "load_into":
            convert.load_into(module, model, checkpoint)
    elif name == "back":
        import convert

        started = time.perf_counter()
        convert.convert_back(model, file, out, like=checkpoint)
    elif name == "read":
        import os

        from peers import read

        started = time.perf_counter()
        read(checkpoint, str(len(os.sched_getaffinity(0))))
    elif name == "tensorstore":
        started = time.perf_counter()
        _write_with_tensorstore(file, out)
    else:
        import numpy as np
        import orbax.checkpoint as ocp
        from safetensors.numpy import load_file as load_arrays

        started = time.perf_counter()
        tree: dict[str, Any] = {}
        for key, x in load_arrays(file).items():
            *path, last = key.split(".")
            inner = tree
            for step in path:
                inner = inner.setdefault(step, {})
            inner[last] = np.ascontiguousarray(x.T)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(out, tree)
    print(time.perf_counter() - started)


def _write_with_tensorstore(file: str, out: str) -> None:
    import numpy as np
    import tensorstore as ts

    from convert.writing.written import open_written

    written, context, futures = open_written(file), ts.Context(), []
    for name, spec in written.specs.items():
        bits = np.array(written.read(name)).view(np.uint16)
        zarr = {"shape": spec.shape, "chunks": spec.shape, "dtype": "<u2", "compressor": {"id": "zstd", "level": 1}}
        store = {"driver": "ocdbt", "base": f"file://{out}/", "path": f"{name}/"}
        array = ts.open({"driver": "zarr", "kvstore": store, "metadata": zarr}, create=True, context=context).result()
        futures.append(array.write(bits))
    for future in futures:
        future.result()


def main() -> None:
    if sys.argv[1] == "--one":
        one(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=None, help="for outputs; a temporary one by default")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        import convert

        file, out = folder / "in.safetensors", folder / "out"
        convert.convert(options.model, options.checkpoint, file)
        said = machine()
        arguments = [options.checkpoint, options.model, str(file), str(out)]
        commands = {name: [sys.executable, __file__, "--one", name, *arguments] for name in WHAT}
        runs = alternate(commands, options.rounds, (out,))
    finally:
        shutil.rmtree(folder)
    result = {
        "machine": said,
        "participants": {name: summary(name, taken) for name, taken in runs.items()},
        "bounds": bounds(runs),
    }
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


BESIDE, ALONE = 256, 64  # MB; the way forth takes 50


def bounds(runs: Mapping[str, Runs]) -> list[dict[str, Any]]:
    """Return what must hold, what was measured, and whether it holds: the median of the rounds, or the most memory of any."""
    read, load_file, load_into, floor, back, script = (
        seconds_of(runs[name]) for name in ("read", "load_file", "load_into", "tensorstore", "back", "script")
    )
    memory = {name: max(taken.anon) / 1e6 for name, taken in runs.items()}
    ratios = {
        "back: at most 1.5 x reading IN and writing the same bytes": ([b / f for b, f in zip(back, floor, strict=True)], 1.5),
        "back: at most a third of load_file, NumPy, StandardCheckpointer.save": ([b / s for b, s in zip(back, script, strict=True)], 1 / 3),
        "load_into: no longer than load_file and reading": ([i / (f + r) for i, f, r in zip(load_into, load_file, read, strict=True)], 1.0),
    }  # fmt: skip
    beside = memory["load_into"] - memory["module"]
    return [
        *(_bound(what, statistics.median(rounds), most, rounds) for what, (rounds, most) in ratios.items()),
        _bound(f"load_into: at most {BESIDE} MB beside the module", beside, BESIDE),
        _bound(f"back: at most {ALONE} MB", memory["back"], ALONE),
    ]


def _bound(what: str, measured: float, most: float, rounds: Sequence[float] = ()) -> dict[str, Any]:
    holds = {"measured": round(measured, 3), "most": round(most, 3), "holds": measured <= most}
    return {"what": what, **holds, **({"rounds": [round(x, 3) for x in rounds]} if rounds else {})}


def seconds_of(taken: Runs) -> list[float]:
    return [float(text.split()[-1]) for text in taken.output]


def summary(name: str, taken: Runs) -> dict[str, Any]:
    seconds = seconds_of(taken)
    anon = round(max(taken.anon) / 1e6, 1)
    return {"what": WHAT[name], "seconds": round(statistics.median(seconds), 2), "all_seconds": [round(x, 2) for x in seconds], "rss_anon_mb": anon}  # fmt: skip


if __name__ == "__main__":
    main()
