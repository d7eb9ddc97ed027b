"""Reads checkpoints of the way back with MaxText's own reader, and compares the logits with the recorded ones, on a CPU.

    (the environment of make_maxtext.py, and pip install .)
    PYTHONPATH=tests python tests/golden/read_back_maxtext.py [CASE ...]

Each golden becomes transformers' tensors, without the header of `convert`, and these become a checkpoint without `--like`; with it, where
a factor rounds. `model_creation_utils.from_pretrained` reads it from `load_parameters_path`, as MaxText's own runs do.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from make_maxtext import CASES, HERE, configured, maxtext_utils, model_creation_utils, pyconfig
from safetensors.numpy import load_file, save_file

import convert
from support import maxtext

BOUND = 2e-6  # what the order of sums changes


def written_back(case: str, folder: Path) -> Path:
    """Convert there and back."""
    tensors, out = maxtext.converted(case, folder / "tensors"), folder / "ckpt"
    file = tensors / "model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt"})
    try:
        convert.convert_back(maxtext.rules(case), tensors, out, layout=maxtext.layout(case))
    except convert.PlanError:
        convert.convert_back(
            maxtext.rules(case), tensors, out, maxtext.checkpoint(case), settings=maxtext.settings(case)
        )
    return out


def main() -> None:
    """Read the cases of the command line, or all that have a golden."""
    wrong = 0
    for case in sys.argv[1:] or maxtext.CASES:
        with tempfile.TemporaryDirectory() as folder:
            name, _, changes = CASES[case]
            path = written_back(case, Path(folder))
            config = pyconfig.initialize_pydantic(configured(name, {**changes, "load_parameters_path": str(path)}))
            mesh = maxtext_utils.get_mesh_from_config(config)
            io = np.load(HERE / case / "io.npz")
            tokens = io["tokens"]
            positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
            with jax.set_mesh(mesh):
                model = model_creation_utils.from_pretrained(config, mesh=mesh, rng_key=jax.random.PRNGKey(7))
                logits = model(tokens, positions, decoder_segment_ids=np.ones_like(tokens), enable_dropout=False)
        error = float(np.abs(np.asarray(logits) - io["logits"]).max() / np.abs(io["logits"]).max())
        wrong += not error < BOUND
        print(f"{case}: logits {error:.1e} from the recorded ones", flush=True)
    sys.exit(wrong)


if __name__ == "__main__":
    main()
