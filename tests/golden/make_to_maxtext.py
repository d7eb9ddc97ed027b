"""Writes `maxtext/*/to_maxtext.json`: what MaxText's own `to_maxtext` makes of a Hugging Face directory, on a CPU.

    (the environment of make_maxtext.py; torch is not needed)
    python tests/golden/make_to_maxtext.py [CASE ...]

The cases are those of make_maxtext.py. `to_maxtext` takes the sizes of the model in transformers from a table of published models; its
entry gets the sizes of the case, with the function by which `to_huggingface` does the same. The tensors have the names and shapes of MaxText's
tables, and bfloat16 values that are drawn by their names, from a stream that is frozen for good: tests draw the same.

A file has `config`, the `config.json` of the directory; `tensors`, name -> shape; and `leaves`: for each `--save_dtype` path -> dtype, shape
and the start of SHA-256 of every leaf of `params/params` in the checkpoint that it writes. Of a model that it cannot convert, the file has
the `error`. The tensors are read with safetensors' NumPy interface instead of torch's.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import zlib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from make_maxtext import (
    CASES,
    DIGITS,
    HERE,
    QWEN_WITH_TOWER,
    configured,
    pyconfig,
    qwen_shapes,
    size_tower,
    sized_gemma4,
    sized_qwen,
    to_huggingface,
)
from maxtext.checkpoint_conversion import to_maxtext
from maxtext.checkpoint_conversion.utils.hf_shape import HF_SHAPE
from maxtext.multimodal import processor_gemma3, processor_gemma4
from safetensors.numpy import load_file, save_file

DTYPES = ("bfloat16", "float32")


def drawn(name: str, shape: list[int]) -> np.ndarray:
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return drawn.astype(np.float32).astype(ml_dtypes.bfloat16)  # ml_dtypes before 0.7 rounded float64 to float32 first


def names(mapped: Any) -> Iterator[str]:
    """Yield the tensors of an entry of MaxText's table: a name, or a list of them for each stacked axis."""
    if isinstance(mapped, str):
        yield mapped
    else:
        for one in mapped or ():
            yield from names(one)


def directory(argv: list[str], name: str, folder: Path) -> dict[str, Any]:
    """Write a directory of the case's sizes, and put its `config.json` into MaxText's table."""
    config = pyconfig.initialize_pydantic(argv)
    gemma4, qwen_vl = name.startswith("gemma4"), name.startswith(QWEN_WITH_TOWER)
    sizes = {True: sized_gemma4, False: lambda _: deepcopy(to_maxtext.HF_MODEL_CONFIGS[name])}[gemma4]
    known = sized_qwen(config) if qwen_vl else sizes(config)
    to_huggingface._validate_or_update_architecture(known, config, override=True)
    if config.use_multimodal and gemma4:
        height, width = config.image_size_for_vit
        processor_gemma4.GEMMA4_IMAGE_HEIGHT, processor_gemma4.GEMMA4_IMAGE_WIDTH = height, width
    elif config.use_multimodal and not qwen_vl:
        size_tower(known, config)
        processor_gemma3.GEMMA_DEFAULT_IMAGE_SIZE = config.image_size_for_vit  # of the image that initializes the model
    sized = getattr(known, "text_config", known)
    if getattr(sized, "layer_types", None):  # one for each layer of the published model
        sized.layer_types = sized.layer_types[: sized.num_hidden_layers]
    if name.startswith("gemma2"):
        sized.query_pre_attn_scalar = sized.head_dim  # as published, for all but 27B
    if hasattr(sized, "qk_head_dim"):
        sized.qk_head_dim = sized.qk_nope_head_dim + sized.qk_rope_head_dim
    if hasattr(known, "compress_ratios"):
        known.compress_ratios = config.compress_ratios
    if name.startswith("qwen3-next"):  # transformers 5 replaces it by the list of layers
        known.full_attention_interval = config.inhomogeneous_layer_cycle_interval
    to_maxtext.HF_MODEL_CONFIGS[name] = known
    said = known.to_dict()
    if qwen_vl and "text_config" in said:  # its entry is of the base class, without a type
        said |= {"model_type": said["text_config"]["model_type"].removesuffix("_text")}
    mapped = to_maxtext.PARAM_MAPPING[name](said, config, config.scan_layers)
    leaves, _ = to_maxtext.get_maxtext_model_info(to_maxtext.pyconfig.initialize(argv))
    used = to_maxtext.validate_and_filter_param_map_keys(mapped.keys(), leaves.keys())
    shapes = HF_SHAPE.get(name, lambda _: {})(said) | (qwen_shapes(config, said) if qwen_vl else {})
    tensors = {one: list(shapes[one]) for one in sorted({x for leaf in used for x in names(mapped[leaf])})}
    save_file(
        {one: drawn(one, shape) for one, shape in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(said))
    return {"config": said, "tensors": tensors}


def converted(argv: list[str], given: Path, dtype: str, out: Path) -> dict[str, Any]:
    """Run `to_maxtext`; return dtype, shape and checksum of each leaf."""
    to_maxtext.load_hf_dict_from_safetensors = lambda path, **_: load_file(Path(path) / "model.safetensors")
    argv = [*argv, f"base_output_directory={out}"]
    eager = {
        "lazy_load_tensors": False,
        "eager_load_method": "safetensors",
    }  # lazy tensors fail with this version of Orbax
    to_maxtext.main(argv, hf_model_path=str(given), save_dtype=dtype, simulated_cpu_devices_count=1, **eager)
    tree = ocp.PyTreeCheckpointer().restore(out / "0" / "items")["params"]["params"]
    leaves = {"/".join(key.key for key in path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}
    return {name: [x.dtype.name, list(x.shape), _digest(x)] for name, x in sorted(leaves.items())}


def _digest(x: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:DIGITS]


def main() -> None:
    """Write the cases of the command line, or all that MaxText converts."""
    for case in sys.argv[1:] or CASES:
        name, _, changes = CASES[case]
        argv = configured(name, changes)
        with tempfile.TemporaryDirectory() as folder:
            given = Path(folder) / "given"
            given.mkdir()
            try:
                made = directory(argv, name, given)
                made["leaves"] = {dtype: converted(argv, given, dtype, Path(folder) / dtype) for dtype in DTYPES}
            except (KeyError, TypeError, ValueError) as error:  # what MaxText cannot convert is a fact of the case
                made = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"}
        (HERE / case / "to_maxtext.json").write_text(json.dumps(made).replace("], ", "],\n") + "\n")
        print(case, made.get("error") or len(made["leaves"]["float32"]), flush=True)


if __name__ == "__main__":
    main()
