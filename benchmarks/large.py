"""Plans a checkpoint of 671 billion parameters, and simulates its conversion on 1, 8 and 64 workers with the costs of this machine.

    python benchmarks/large.py [--shard-size 5GB] [--json results/large.json]

The tree is DeepSeek-V3's, a leaf for each expert: 61 layers, of which 3 are dense, and 256 experts (sizes of its config.json). Only metadata
is made: names, shapes, dtypes. The plan, the layout and the tasks (one for each file) are those that `--engine ray` makes; seconds and memory are measured.
The simulation gives each task to the worker that is free first. `--rate` is what a conversion on one machine reached; network and store are assumed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring import machine

from convert.checkpoints.source import Leaf, Source
from convert.cluster.tasks import Task, cut
from convert.core.tensor_spec import TensorSpec
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.rules.parse import parse_models
from convert.writing.execute import plan_layout
from convert.writing.file_layout import Layout
from convert.writing.shard_size import parse_size

LAYERS, DENSE, EXPERTS, WIDTH, HIDDEN, EXPERT, HEADS, VOCABULARY = 61, 3, 256, 7168, 18432, 2048, 128, 129280
QUERY, KEYS, NOPE, ROPE, VALUE = 1536, 512, 128, 64, 128
RULES = """\
model: deepseek-large
title: a mixture of experts, a leaf for each expert
root: params
targets: {torch: {loads: x.MoE}}
rules:
- {from: embed, axes: VD, parameter: model.embed_tokens.weight}
- {einsum: "...D,DV->...V", from: head/kernel, linear: lm_head}
- {from: final_norm/scale, axes: D, parameter: model.norm.weight}
- {einsum: "...D,DF->...F", from: "dense_layers_{m}/mlp/{gate,up}/kernel", linear: "model.dense_layers.{m}.mlp.{gate,up}_proj"}
- {einsum: "...F,FD->...D", from: "dense_layers_{m}/mlp/down/kernel", linear: "model.dense_layers.{m}.mlp.down_proj"}
- {einsum: "...D,DE->...E", from: "moe_layers_{n}/router/kernel", linear: "model.moe_layers.{n}.mlp.gate"}
- {from: "moe_layers_{n}/router_bias", axes: E, parameter: "model.moe_layers.{n}.mlp.gate.e_score_correction_bias"}
- {einsum: "...D,DG->...G", from: "moe_layers_{n}/shared/{gate,up}/kernel", linear: "model.moe_layers.{n}.mlp.shared_experts.{gate,up}_proj"}
- {einsum: "...G,GD->...D", from: "moe_layers_{n}/shared/down/kernel", linear: "model.moe_layers.{n}.mlp.shared_experts.down_proj"}
- {einsum: "...D,DG->...G", from: "moe_layers_{n}/experts_{e}/{gate,up}/kernel", linear: "model.moe_layers.{n}.mlp.experts.{e}.{gate,up}_proj"}
- {einsum: "...G,GD->...D", from: "moe_layers_{n}/experts_{e}/down/kernel", linear: "model.moe_layers.{n}.mlp.experts.{e}.down_proj"}
"""
EACH_LAYER = """\
- {from: "KIND_layers_{INDEX}/{input,post_attention}_norm/scale", axes: D, parameter: "model.KIND_layers.{INDEX}.{input,post_attention}_layernorm.weight"}
- {from: "KIND_layers_{INDEX}/attention/q_a_norm/scale", axes: Q, parameter: "model.KIND_layers.{INDEX}.self_attn.q_a_layernorm.weight"}
- {from: "KIND_layers_{INDEX}/attention/kv_a_norm/scale", axes: K, parameter: "model.KIND_layers.{INDEX}.self_attn.kv_a_layernorm.weight"}
- {einsum: "...D,DQ->...Q", from: "KIND_layers_{INDEX}/attention/q_a/kernel", linear: "model.KIND_layers.{INDEX}.self_attn.q_a_proj"}
- {einsum: "...Q,QA->...A", from: "KIND_layers_{INDEX}/attention/q_b/kernel", linear: "model.KIND_layers.{INDEX}.self_attn.q_b_proj"}
- {einsum: "...D,DC->...C", from: "KIND_layers_{INDEX}/attention/kv_a/kernel", linear: "model.KIND_layers.{INDEX}.self_attn.kv_a_proj_with_mqa"}
- {einsum: "...K,KB->...B", from: "KIND_layers_{INDEX}/attention/kv_b/kernel", linear: "model.KIND_layers.{INDEX}.self_attn.kv_b_proj"}
- {einsum: "...O,OD->...D", from: "KIND_layers_{INDEX}/attention/o/kernel", linear: "model.KIND_layers.{INDEX}.self_attn.o_proj"}
"""
RULES += "".join(
    EACH_LAYER.replace("KIND", kind).replace("INDEX", index) for kind, index in (("dense", "m"), ("moe", "n"))
)


SCALES = """\
- {from: "moe_layers_{n}/experts_{e}/{gate,up}/scale", axes: XY, parameter: "model.moe_layers.{n}.mlp.experts.{e}.{gate,up}_proj.weight_scale_inv"}
- {from: "moe_layers_{n}/experts_{e}/down/scale", axes: YX, parameter: "model.moe_layers.{n}.mlp.experts.{e}.down_proj.weight_scale_inv"}
"""


def gated(where: str, hidden: int) -> dict[str, tuple[int, ...]]:
    """Return the three kernels of a gated network."""
    shapes = {"gate": (WIDTH, hidden), "up": (WIDTH, hidden), "down": (hidden, WIDTH)}
    return {f"{where}/{name}/kernel": shape for name, shape in shapes.items()}


def kernels(scales: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the leaves: name -> shape."""
    found: dict[str, tuple[int, ...]] = {
        "embed": (VOCABULARY, WIDTH),
        "head/kernel": (WIDTH, VOCABULARY),
        "final_norm/scale": (WIDTH,),
    }
    for i in range(LAYERS):
        at = f"dense_layers_{i}" if i < DENSE else f"moe_layers_{i - DENSE}"
        attention = {
            "q_a": (WIDTH, QUERY),
            "q_b": (QUERY, HEADS * (NOPE + ROPE)),
            "kv_a": (WIDTH, KEYS + ROPE),
            "kv_b": (KEYS, HEADS * (NOPE + VALUE)),
            "o": (HEADS * VALUE, WIDTH),
        }
        found |= {f"{at}/attention/{name}/kernel": shape for name, shape in attention.items()}
        found |= {f"{at}/{name}_norm/scale": (WIDTH,) for name in ("input", "post_attention")}
        found |= {f"{at}/attention/q_a_norm/scale": (QUERY,), f"{at}/attention/kv_a_norm/scale": (KEYS,)}

        if i < DENSE:
            found |= gated(f"{at}/mlp", HIDDEN)
            continue
        found |= {f"{at}/router/kernel": (WIDTH, EXPERTS), f"{at}/router_bias": (EXPERTS,)}
        found |= gated(f"{at}/shared", EXPERT)
        for e in range(EXPERTS):
            found |= gated(f"{at}/experts_{e}", EXPERT)
            if scales:  # one for each block of 128 x 128, as the checkpoint in float8 has them
                blocks = (WIDTH // 128, EXPERT // 128)
                found |= {f"{at}/experts_{e}/{name}/scale": blocks for name in ("gate", "up")}
                found[f"{at}/experts_{e}/down/scale"] = blocks[::-1]
    return found


class SpecsOnly(Source):
    """A checkpoint without arrays."""

    format = "names and shapes"

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path = Path("/checkpoint")
        self.leaves = {
            f"params/{name}": Leaf(("params", *name.split("/")), TensorSpec(shape, "bfloat16"))
            for name, shape in shapes.items()
        }

    def read(self, name: str) -> Any:
        raise AssertionError("a plan reads no array")


def simulate(tasks: Sequence[Task], workers: int, costs: argparse.Namespace) -> dict[str, Any]:
    """Return what a run takes: the next task goes to the worker that is free first.

    A worker reads and writes through its network at once, and computes meanwhile; all workers share the store. A task therefore takes the longest of
    the three, and a start.
    """
    share = min(costs.network, costs.store / workers)  # bytes per second, each way
    free, spent = [0.0] * workers, {"processors": 0.0, "network": 0.0, "store": 0.0}
    for task in tasks:
        seconds = {
            "processors": task.nbytes / costs.rate,
            "network": max(task.read, task.nbytes) / costs.network,
            "store": max(task.read, task.nbytes) / (costs.store / workers),
        }
        spent = {name: spent[name] + took for name, took in seconds.items()}
        heapq.heappush(free, heapq.heappop(free) + costs.start + max(seconds.values()))
    nbytes, busy = sum(task.nbytes for task in tasks), max(free)
    return {
        "workers": workers,
        "seconds": round(costs.plan + busy, 1),
        "gb_per_second": round(nbytes / busy / 1e9, 2),
        "bottleneck": max(spent, key=lambda name: spent[name]),
        "memory_per_worker": max(task.memory for task in tasks),
        "idle": round(1 - sum(free) / workers / busy, 3),
        "share_of_the_store": round(share / 1e9, 2),
    }


def planned(scales: bool, shard_size: str) -> tuple[SpecsOnly, Plan, Layout, list[Task], dict[str, float]]:
    """Make the plan, the layout and the tasks; return them and the seconds of each."""
    source = SpecsOnly(kernels(scales))
    started = time.perf_counter()
    plan = make_plan(parse_models(RULES + SCALES * scales, "large.yaml")[0], source)
    between = time.perf_counter()
    _, layout = plan_layout(plan, Path("out"), parse_size(shard_size, "--shard-size"))
    tasks = cut(plan, layout)
    ended = time.perf_counter()
    seconds = {"plan_seconds": round(between - started, 2), "tasks_seconds": round(ended - between, 2)}
    return source, plan, layout, tasks, seconds


def plan_with_scales(shard_size: str) -> dict[str, float]:
    """Plan the same tree with a leaf of scales beside each expert's kernel."""
    source, _, _, _, seconds = planned(True, shard_size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"leaves": len(source.leaves), **seconds, "peak_rss_mb": round(peak / 1e6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard-size", default="5GB")
    parser.add_argument(
        "--rate",
        type=float,
        default=1.4e9,
        help="bytes per second of a conversion on one worker (results/gemma-3-1b.json)",
    )
    parser.add_argument(
        "--network", type=float, default=1.25e9, help="bytes per second of a worker, each way (10 Gbit/s)"
    )
    parser.add_argument(
        "--store", type=float, default=25e9, help="bytes per second of the store for all workers, each way"
    )
    parser.add_argument("--start", type=float, default=0.5, help="seconds of a task before its first byte")
    parser.add_argument("--object", type=int, default=8 << 20, help="bytes of a request, for the number of requests")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    source, plan, layout, tasks, seconds = planned(False, options.shard_size)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    options.plan = sum(seconds.values())
    stored = sum(leaf.spec.nbytes for leaf in source.leaves.values())
    read = sum(task.read for task in tasks)
    result = {
        "machine": machine(),
        "parameters": sum(leaf.spec.size for leaf in source.leaves.values()),
        "leaves": len(source.leaves),
        "tensors": len(plan.steps),
        "bytes": stored,
        "files": len(layout.files),
        "plan": {**seconds, "peak_rss_mb": round(peak / 1e6)},
        "plan_with_scales": plan_with_scales(options.shard_size),
        "read_bytes": read,
        "requests": {
            "read": sum(-(-leaf.spec.nbytes // options.object) for leaf in source.leaves.values()),
            "write": sum(-(-task.nbytes // options.object) for task in tasks),
        },
        "costs": {name: getattr(options, name) for name in ("rate", "network", "store", "start", "object")},
        "runs": [simulate(tasks, workers, options) for workers in (1, 8, 64)],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
