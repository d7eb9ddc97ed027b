"""Writes a Gemma 3 checkpoint of a published size with random weights, as the gemma package lays it out on disk.

    python benchmarks/checkpoints.py OUT_DIR [--size 1b] [--layout nested|flat|stacked|kauldron] [--dtype bfloat16]

Needs orbax-checkpoint and JAX (the test environment), and as much memory as the checkpoint takes on disk: 1b has 1.0 billion
parameters: 2.0 GB in bfloat16, 1.4 GB on disk, because Orbax compresses the exponents, 20 seconds; 4b is four times that. No
model is run: shapes and names are those of google-deepmind/gemma@7691fd4 gm/nn/_gemma.py and gm/ckpts/_compat.py, which also
wrote the golden checkpoints of the tests.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SIZES = {  # layers, width, heads, kv heads, head width, feed-forward width, vocabulary
    "tiny": (8, 48, 4, 2, 12, 96, 256),
    "270m": (18, 640, 4, 1, 256, 2048, 262144),
    "1b": (26, 1152, 4, 1, 256, 6912, 262144),
    "4b": (34, 2560, 8, 4, 256, 10240, 262144),
}
PATTERN = 6  # five local layers to one global


def shapes(size: str, depth: int | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the flat layout, below ``transformer/``."""
    layers, width, heads, kv_heads, head, hidden, vocabulary = SIZES[size]
    layers = depth or layers
    yield "embedder/input_embedding", (vocabulary, width)
    yield "final_norm/scale", (width,)
    for i in range(layers):
        at = f"layer_{i}"
        yield f"{at}/attn/q_einsum/w", (heads, width, head)
        yield f"{at}/attn/kv_einsum/w", (2, kv_heads, width, head)
        yield f"{at}/attn/attn_vec_einsum/w", (heads, head, width)
        for name in ("_query_norm", "_key_norm"):
            yield f"{at}/attn/{name}/scale", (head,)
        yield f"{at}/mlp/gating_einsum/w", (2, hidden, width)
        yield f"{at}/mlp/linear/w", (hidden, width)
        for name in ("pre_attention_norm", "post_attention_norm", "pre_ffw_norm", "post_ffw_norm"):
            yield f"{at}/{name}/scale", (width,)


class Scratch:
    """Allocates arrays in unnamed files, so that a small machine can make a checkpoint of any size."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        """Return an array whose pages the system may write to the disk."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.truncate(math.prod(shape) * np.dtype(dtype).itemsize)
            return np.memmap(file, dtype, shape=shape).view(np.ndarray)


def random_array(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scratch: Scratch
) -> np.ndarray[Any, Any]:
    """Return random signs and mantissas with magnitudes from 2**-9 to 2**-5: as incompressible as weights, and quick."""
    out = scratch.empty(shape, dtype)
    flat = out.reshape(-1)
    for start in range(0, flat.size, 1 << 24):
        bits = rng.integers(0, 1 << 16, min(1 << 24, flat.size - start), np.uint16)
        exponent = (118 + ((bits >> 7) & 3)) << 7  # bfloat16: sign, 8 bits of exponent (bias 127), 7 of mantissa
        values = ((bits & 0x807F) | exponent).astype(np.uint16).view(ml_dtypes.bfloat16)
        flat[start : start + values.size] = values
    return out


def tree(
    size: str, layout: str, dtype: str, scratch: Scratch, seed: int = 0, depth: int | None = None
) -> dict[str, Any]:
    """Return the pytree as the gemma package saves it, with the same weights in every layout."""
    rng = np.random.default_rng(seed)
    flat = {name: random_array(rng, shape, dtype, scratch) for name, shape in shapes(size, depth)}
    if layout == "stacked":
        stacks: dict[str, list[np.ndarray[Any, Any]]] = {}
        for name in [n for n in flat if n.startswith("layer_")]:
            layer, rest = name.removeprefix("layer_").split("/", 1)
            key = f"stacked_layers/attention_type_{int(layer) % PATTERN}/{rest}"
            stacks.setdefault(key, []).append(flat.pop(name))
        for name, layers in stacks.items():
            flat[name] = scratch.empty((len(layers), *layers[0].shape), dtype)
            np.stack(layers, out=flat[name])
    if layout in ("flat", "stacked"):  # keys with slashes, then the name of the parameter
        semi: dict[str, Any] = {}
        for name, x in flat.items():
            module, leaf = name.rsplit("/", 1)
            semi.setdefault(f"transformer/{module}", {})[leaf] = x
        return semi
    nested: dict[str, Any] = {}
    for name, x in flat.items():
        *path, last = (
            name.removesuffix("/w").split("/") if name.endswith(("linear/w", "gating_einsum/w")) else name.split("/")
        )
        node = nested
        for key in path:
            node = node.setdefault(key, {})
        node[last] = x
    return nested if layout == "nested" else {"params": nested, "step": np.int32(100) * np.ones((), np.int32)}


def main() -> None:
    import orbax.checkpoint as ocp

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--layout", choices=["nested", "flat", "stacked", "kauldron"], default="nested")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, help="instead of as many as the size has")
    parser.add_argument("--files", action="store_true", help="a zarr directory for each leaf, not OCDBT")
    options = parser.parse_args()
    started = time.monotonic()
    weights = tree(
        options.size, options.layout, options.dtype, Scratch(options.out.resolve().parent), depth=options.layers
    )
    # OCDBT keeps its writes in memory until the end, so a copy by the handler is not needed.
    without_copy = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    ocp.type_handlers.register_type_handler(np.ndarray, without_copy, override=True)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=not options.files, save_concurrent_gb=1 if options.files else None)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(options.out.resolve(), args=ocp.args.PyTreeSave(weights))
    print(
        f"{options.out}: Gemma 3 {options.size}, {options.layout}, {options.dtype}, {time.monotonic() - started:.0f} s"
    )


if __name__ == "__main__":
    main()
