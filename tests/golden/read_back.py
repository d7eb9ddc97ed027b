"""Reads checkpoints of the way back with the loader of the gemma package, and compares the logits with the recorded ones, on a CPU.

    pip install -e '.[test]' && pip install --no-deps --target /some/folder gemma==3.3.0 chex==0.1.92 toolz
    PYTHONPATH=/some/folder:tests python tests/golden/read_back.py

Each golden of Gemma becomes transformers' tensors, without the header of `convert`, and these become a checkpoint in every layout without
`--like`, and in that of the golden with it (KAULDRON, too). `gm.ckpts.load_params` reads it, with no argument but the path. kauldron has the stand-in of make_gemma3_vision.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from make_gemma3_vision import HERE, _stand_in_for_kauldron
from safetensors.numpy import load_file, save_file

import convert
from support import gemma_models
from support.goldens import checkpoint, golden_io

LAYOUTS = ("FLAT", "NESTED", "STACKED")
BOUND = 1e-6


def restored(case: str, layout: str | None, folder: Path) -> Any:
    """Convert there and back; return what the package's loader gives."""
    from gemma.gm.ckpts import _checkpoint

    tensors, out = folder / f"{case}.out", folder / f"{case}.{layout}"
    if not tensors.exists():
        convert.convert("gemma", checkpoint(case), tensors, settings=gemma_models.settings(case))
        file = tensors / "model.safetensors"
        save_file(load_file(file), file, metadata={"format": "pt"})
    said = {"gating": "FD" if case == "gemma2-9b" else "DF"} if case.startswith("gemma2") else {}
    if layout is None:
        like = train_state(case, folder) if case == "gemma3-kauldron" else checkpoint(case)
        convert.convert_back("gemma", tensors, out, like, settings=gemma_models.settings(case))
    else:
        convert.convert_back("gemma", tensors, out, layout=layout, settings=said)
    return _checkpoint.load_params(out)


def train_state(case: str, folder: Path) -> Path:
    """Write the state that kauldron saves: the loader knows it by its four keys, and the golden has three."""
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(checkpoint(case).resolve())
        checkpointer.save(folder / "state", {**state, "collections": {}})
    return folder / "state"


def model(case: str) -> Any:
    """Return upstream's Transformer of a golden."""
    from gemma.gm.nn import _config, _modules, _transformer

    said = json.loads((HERE / case / "case.json").read_text())["config"]
    kinds = tuple(_modules.AttentionType[kind] for kind in said.pop("attention_types"))
    said = {key: value for key, value in said.items() if key in _config.TransformerConfig.__dataclass_fields__}
    return _transformer.Transformer(config=_config.TransformerConfig(**said, attention_types=kinds), dtype=jnp.float32)


def stand_in() -> None:
    """The names of kauldron that the package's loader uses."""
    _stand_in_for_kauldron()
    everywhere = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), "d"), jax.sharding.PartitionSpec())
    vars(sys.modules["kauldron.kd"]).update(
        sharding=types.SimpleNamespace(ShardingTree=Any, REPLICATED=everywhere),
        ckpts=types.SimpleNamespace(AbstractPartialLoader=object),
        train=types.SimpleNamespace(TrainState=Any),
    )


def main() -> None:
    """Read the goldens of the command line, or all, in each layout."""
    stand_in()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder, jax.default_matmul_precision("highest"):
        for case in sys.argv[1:] or gemma_models.CASES:
            io = golden_io(case)
            for layout in (*LAYOUTS, None):
                params = restored(case, layout, Path(folder))
                logits = np.asarray(model(case).apply({"params": params}, jnp.asarray(io["tokens"])).logits)
                error = float(np.abs(logits - io["logits"]).max() / np.abs(io["logits"]).max())
                wrong += not error < BOUND
                print(
                    f"{case} {layout or '--like'}: {len(jax.tree.leaves(params))} leaves, logits {error:.1e} from the recorded ones"
                )
    sys.exit(wrong)


if __name__ == "__main__":
    main()
