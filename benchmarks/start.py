"""Measures times that do not depend on bytes: the start of the program, a small checkpoint, and one with 50,640 leaves.

    python benchmarks/start.py FOLDER [--rounds 5] [--json results/start.json]

Writes an unscanned mixture of experts (48 layers, 350 experts, 0.3 GB of bfloat16), and two with fewer layers, into FOLDER with Orbax unless
they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from measuring import alternate, machine, summaries

SMALL = Path(__file__).parents[1] / "examples" / "checkpoints" / "timesfm-2.5"
RULES = """\
model: moe
title: a mixture of experts
root: params
targets: {torch: {loads: x.MoE}}
rules:
- {einsum: "...D,DF->...F", from: "layers_{i}/moe/experts_{e}/{gate,up}/kernel", linear: "layers.{i}.experts.{e}.{gate,up}_proj"}
- {einsum: "...F,FD->...D", from: "layers_{i}/moe/experts_{e}/down/kernel", linear: "layers.{i}.experts.{e}.down_proj"}
- {einsum: "...D,DE->...E", from: "layers_{i}/attn/{q,k,v}/kernel", linear: "layers.{i}.attn.{q,k,v}_proj"}
- {einsum: "...E,ED->...D", from: "layers_{i}/attn/o/kernel", linear: "layers.{i}.attn.o_proj"}
- {from: "layers_{i}/norm/scale", multiplies_by: scale, epsilon: 1e-6, rms_norm: "layers.{i}.norm"}
"""


DEPTHS = (6, 24, 48)
EACH = 350 * 3 + 5  # leaves of a layer


def tree(layers: int, experts: int = 350, width: int = 64, hidden: int = 48) -> dict[str, Any]:
    """Return the pytree with random values."""
    rng = np.random.default_rng(0)

    def kernel(*shape: int) -> dict[str, Any]:
        return {"kernel": rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)}

    def layer() -> dict[str, Any]:
        each = (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width)))
        return {
            "moe": {f"experts_{e}": {name: kernel(*shape) for name, shape in each} for e in range(experts)},
            "attn": {name: kernel(width, width) for name in "qkvo"},
            "norm": {"scale": np.ones(width, ml_dtypes.bfloat16)},
        }

    return {"params": {f"layers_{i}": layer() for i in range(layers)}}


def checkpoint_of(folder: Path, layers: int) -> Path:
    """Return the checkpoint of this number of layers; write it where it does not exist."""
    checkpoint = folder / f"mixture-{layers}"
    if not checkpoint.exists():
        import orbax.checkpoint as ocp

        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save(checkpoint.resolve(), args=ocp.args.PyTreeSave(tree(layers)))
    return checkpoint


def planning(checkpoint: Path, rules: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds to open the checkpoint and to plan, inside one process."""
    from convert import open_source
    from convert.planning.planner import make_plan
    from convert.rules.parse import parse_models

    opened, planned = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        source = open_source(checkpoint)
        between = time.perf_counter()
        make_plan(parse_models(rules.read_text(), rules.name)[0], source)
        opened.append(between - started)
        planned.append(time.perf_counter() - between)
    return {"open": round(statistics.median(opened), 2), "plan": round(statistics.median(planned), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rules = options.folder / "mixture.yaml"
    rules.write_text(RULES)
    within = {
        f"{depth * EACH:,} leaves": planning(checkpoint_of(options.folder, depth), rules, options.rounds)
        for depth in DEPTHS
    }
    checkpoint = checkpoint_of(options.folder, DEPTHS[-1])
    out = str(options.folder / "start.safetensors")
    convert = [sys.executable, "-m", "convert"]
    many = [*convert, str(rules), str(checkpoint), out, "--overwrite", "--jobs"]
    commands = {
        "convert --help": [*convert, "--help"],
        "convert, 0.6 MB": [*convert, "timesfm", str(SMALL), out, "--overwrite"],
        "convert plan, 50,640 leaves": [*convert, "plan", str(rules), str(checkpoint)],
        **{f"convert --jobs {k}, 50,640 leaves": [*many, str(k)] for k in sorted({1, len(os.sched_getaffinity(0))})},
    }
    runs = summaries(alternate(commands, options.rounds, [Path(out)]), "")
    results = {"machine": machine(), "within": within, "runs": runs}
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
