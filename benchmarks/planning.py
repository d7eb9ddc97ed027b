"""Measures how long a plan takes for the published mixtures of experts, of which MaxText stacks all experts in one leaf.

    python benchmarks/planning.py [--rounds 7] [--json results/planning.json]
    PYTHONPATH=tests python benchmarks/planning.py --published --json results/planning-published.json

A plan needs names, shapes and dtypes only: the trees are those of MaxText's configurations, scanned and unscanned, without values.
`--published` plans every published size of which the tests have the names and shapes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from measuring import machine

import convert
from convert.checkpoints.source import Leaf, Source
from convert.core.ops import Take
from convert.core.system.process import collector_paused
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import Part, PartLayout, Step
from convert.planning.plan import Plan

Shape = tuple[int, ...]
PARAMS = "params/params"  # of a train state
NORMS = ("post_self_attention_layer_norm", "pre_self_attention_layer_norm")


class NamesAndShapes(Source):
    """A checkpoint of which only the tree is known."""

    format = "names and shapes"

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self.path = Path("/tree")
        self.leaves = {
            name: Leaf(tuple(name.split("/")), TensorSpec(shape, "bfloat16")) for name, shape in shapes.items()
        }

    def read(self, name: str) -> np.ndarray[Any, Any]:
        raise AssertionError("a plan reads no array")


def mlp(path: str, width: int, hidden: int) -> dict[str, Shape]:
    return {
        f"{path}/wi_0/kernel": (width, hidden),
        f"{path}/wi_1/kernel": (width, hidden),
        f"{path}/wo/kernel": (hidden, width),
    }


def experts(path: str, count: int, width: int, hidden: int) -> dict[str, Shape]:
    up, down = (count, width, hidden), (count, hidden, width)
    return {f"{path}/gate/kernel": (width, count), f"{path}/wi_0": up, f"{path}/wi_1": up, f"{path}/wo": down}


def qwen3(width: int, heads: int, groups: int, head: int, hidden: int, count: int) -> dict[str, Shape]:
    """Return the leaves of a layer of Qwen3-MoE."""
    of_group = (width, groups, head)
    return {
        **{f"{name}/scale": (width,) for name in NORMS},
        **{f"self_attention/{name}/kernel": of_group for name in ("key", "value")},
        **{f"self_attention/{name}_norm/scale": (head,) for name in ("key", "query")},
        "self_attention/query/kernel": (width, heads, head),
        "self_attention/out/kernel": (heads, head, width),
        **experts("moe_block", count, width, hidden),
    }


def deepseek3_attention(
    width: int, heads: int, queries: int, keys: int, nope: int, rope: int, value: int
) -> dict[str, Shape]:
    """Return the leaves of the attention of a layer of DeepSeek 3, and of its norms."""
    low = "self_attention"
    return {
        **{f"{name}/scale": (width,) for name in NORMS},
        f"{low}/wq_a/kernel": (width, queries),
        f"{low}/q_norm/scale": (queries,),
        f"{low}/wq_b/kernel": (queries, heads, nope + rope),
        f"{low}/wkv_a/kernel": (width, keys + rope),
        f"{low}/kv_norm/scale": (keys,),
        f"{low}/wkv_b/kernel": (keys, heads, nope + value),
        f"{low}/out/kernel": (heads, value, width),
    }


def stacked(name: str, layers: int, leaves: dict[str, Shape], scanned: bool) -> Iterator[tuple[str, Shape]]:
    """Yield the leaves of all layers: scanned, a layer is an element of the second axis."""
    for leaf, shape in leaves.items():
        if scanned:
            yield f"{PARAMS}/decoder/{name}/{leaf}", (shape[0], layers, *shape[1:])
        else:
            yield from ((f"{PARAMS}/decoder/{name}_{i}/{leaf}", shape) for i in range(layers))


def ends(vocabulary: int, width: int) -> dict[str, Shape]:
    decoder = f"{PARAMS}/decoder"
    head = {f"{decoder}/decoder_norm/scale": (width,), f"{decoder}/logits_dense/kernel": (width, vocabulary)}
    return {f"{PARAMS}/token_embedder/embedding": (vocabulary, width), **head}


def qwen3_235b(scanned: bool) -> dict[str, Shape]:
    return {**ends(151936, 4096), **dict(stacked("layers", 94, qwen3(4096, 64, 4, 128, 1536, 128), scanned))}


def qwen3_30b(scanned: bool) -> dict[str, Shape]:
    return {**ends(151936, 2048), **dict(stacked("layers", 48, qwen3(2048, 32, 4, 128, 768, 128), scanned))}


def deepseek3_671b(scanned: bool) -> dict[str, Shape]:
    attention = deepseek3_attention(7168, 128, 1536, 512, 128, 64, 128)
    block = "DeepSeekMoeBlock_0"
    mixture = {**experts(f"{block}/MoeBlock_0", 256, 7168, 2048), **mlp(f"{block}/shared_experts", 7168, 2048)}
    dense = stacked("dense_layers", 3, {**attention, **mlp("mlp", 7168, 18432)}, scanned)
    sparse = stacked("moe_layers", 58, {**attention, **mixture}, scanned)
    gate = f"nnx_aux/model/decoder/moe_layers{{}}/{block}/MoeBlock_0/gate/bias"
    bias = {gate.format(""): (58, 256)} if scanned else {gate.format(f"_{i}"): (256,) for i in range(58)}
    return {**ends(129280, 7168), **dict(dense), **dict(sparse), **bias}


def qwen3_next_80b(scanned: bool) -> dict[str, Shape]:
    """48 layers: three of a gated delta rule, then one of attention; a scanned unit has the three in one leaf, and the one."""
    width, hidden = 2048, 512
    mixture = {
        "mlp/routed_experts/gate/kernel": (width, 512),
        **{f"mlp/routed_experts/{name}": (512, width, hidden) for name in ("wi_0", "wi_1")},
        "mlp/routed_experts/wo": (512, hidden, width),
        **mlp("mlp/shared_expert", width, hidden),
        "mlp/shared_expert_gate/kernel": (width, 1),
        **{f"{name}_layernorm/scale": (width,) for name in ("input", "post_attention")},
    }
    delta: dict[str, Shape] = {
        "in_proj_qkvz/kernel": (width, 12288),
        "in_proj_ba/kernel": (width, 64),
        "conv1d/kernel": (4, 1, 8192),
        "A_log": (32,),
        "dt_bias": (32,),
        "norm/rms_norm/scale": (128,),
        "out_proj/kernel": (4096, width),
    }
    full: dict[str, Shape] = {
        "query/kernel": (width, 16, 512),
        **{f"{name}/kernel": (width, 2, 256) for name in ("key", "value")},
        **{f"{name}_norm/scale": (256,) for name in ("query", "key")},
        "out/kernel": (4096, width),
    }
    local = {**mixture, **{f"attention/{name}": shape for name, shape in delta.items()}}
    whole = {**mixture, **{f"attention/attention/{name}": shape for name, shape in full.items()}}
    if scanned:
        units = {
            **{f"local_layers/{leaf}": (shape[0], 12, 3, *shape[1:]) for leaf, shape in local.items()},
            **{f"global_layer/{leaf}": (shape[0], 12, *shape[1:]) for leaf, shape in whole.items()},
        }
        return {**ends(151936, width), **{f"{PARAMS}/decoder/layers/{leaf}": shape for leaf, shape in units.items()}}
    layers = [whole if i % 4 == 3 else local for i in range(48)]
    each = {f"{PARAMS}/decoder/layers_{i}/{leaf}": x for i, layer in enumerate(layers) for leaf, x in layer.items()}
    return {**ends(151936, width), **each}


MODELS: dict[str, Callable[[bool], dict[str, Shape]]] = {
    "Qwen3-MoE 30B": qwen3_30b,
    "Qwen3-MoE 235B": qwen3_235b,
    "DeepSeek 3 671B": deepseek3_671b,
    "Qwen 3-Next 80B": qwen3_next_80b,
}


def published(folder: Path) -> Iterator[tuple[str, str, Source]]:
    """Yield name, MODEL and tree of each published size of MaxText and of Flax transformers in tests/models.

    Args:
        folder: for the config.json of each Flax model.
    """
    from models import test_flax_published as of_flax
    from models import test_maxtext_published as of_maxtext

    for name in of_maxtext.SIZES:
        yield f"MaxText {name}", "maxtext", of_maxtext.published(name)
    for name, said in of_flax.PUBLISHED.items():
        source = of_flax.SpecsOnly({leaf: (tuple(shape), "float32") for leaf, shape in said["leaves"].items()})
        source.path = folder / name
        source.path.mkdir()
        (source.path / "config.json").write_text(json.dumps(said["whole"]))
        yield f"Flax {name}", name if name in of_flax.OWN_RULES else "flax-transformers", source


def seconds(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Return the median wall time of a call, and the processor time that it takes at least."""
    walls, processor = [], []
    for _ in range(rounds):
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        made = work()
        processor.append(time.process_time() - cpu)
        walls.append(time.perf_counter() - wall)
        del made
    return {"seconds": round(statistics.median(walls), 3), "cpu_seconds": round(min(processor), 3)}


@collector_paused()
def names_and_objects(plan: Plan) -> object:
    """Make only what a plan holds of each tensor: its name, the text that says which element it is, and its two objects."""
    made = []
    for k in range(len(plan.steps)):
        at = f"i={k}, E={k}"
        part = Part("leaf", (Take(0, k), Take(1, k)), None, PartLayout(""), at, (), ())
        made.append(
            Step(
                f"model.layers.{k}.mlp.experts.{k}.down_proj.weight",
                plan.steps[0].spec,
                (part,),
                "linear",
                plan.steps[0].rule,
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.published:
        with tempfile.TemporaryDirectory() as folder:
            for name, model, source in published(Path(folder)):
                plan = partial(convert.plan_conversion, model, source)
                plan()  # the rule file is parsed once
                results[name] = {"leaves": len(source.leaves), "plan": seconds(plan, options.rounds)}
                print(f"{name}: {results[name]}")
        write(options.json, results)
        return
    for name, tree in MODELS.items():
        for layout in ("scanned", "unscanned"):
            source = NamesAndShapes(tree(layout == "scanned"))
            model = "maxtext-qwen3-next" if "Next" in name else "maxtext"  # unscanned, Qwen 3.5 has the same tree
            plan = convert.plan_conversion(model, source)
            found: dict[str, Any] = {"leaves": len(source.leaves), "tensors": len(plan.steps)}
            for what, work in (
                ("plan", partial(convert.plan_conversion, model, source)),
                ("names and objects alone", partial(names_and_objects, plan)),
            ):
                found[what] = seconds(work, options.rounds)
            results[f"{name}, {layout}"] = found
            print(f"{name}, {layout}: {found}")
    write(options.json, results)


def write(file: Path | None, results: dict[str, Any]) -> None:
    if file:
        file.write_text(json.dumps({"machine": machine(), "plans": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
