"""Measures `convert infer` through the references of two published families, with all layers and small widths.

    python benchmarks/infer.py FOLDER [--rounds 3] [--json results/infer.json]

Writes a TimesFM 2.5 with 20 layers and a Gemma 3 with 26 layers into FOLDER unless they are there. `--shrink` makes them smaller still: the
file is derived with one size of each letter, and confirmed with another. TimesFM needs the timesfm package, Gemma nothing but JAX and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SIZES, Scratch, tree
from measuring import alternate, machine

TIMESFM_LAYERS = 20
GEMMA = (26, 48, 4, 2, 12, 96, 256)
SHRINK = {
    "timesfm": "D=24,48 F=28,36 G=20,40 N=3,4 H=8,12 P=8,12 T=16,24 S=32,48",
    "gemma": "V=64,96 vocab_size=64,96 D=24,36 F=28,44 N=4,6 K=2,3 H=8,12",
}
SETTINGS = {
    "timesfm": "",
    "gemma": "vocab_size=256 sliding_window=8 query_pre_attn_scalar=12 rope_factor_global=8.0 context_length=1024",
}
REFERENCES = {
    "timesfm": "convert.references.timesfm.timesfm_2p5:reference",
    "gemma": "convert.references.gemma.text:reference",
}
PROGRAM = """from convert.core.system import process
process.tune()
from convert.cli.app import run
code = run()
process.end(code if code != 2 else 0)
"""  # as `convert.cli.program` runs a command; 2 says that columns are tied: those of TimesFM's masks
TIMESFM = {  # names and shapes of the published tree, without the layers' axis
    **{f"tokenizer/{name}/kernel": shape for name, shape in
       {"hidden_layer": (64, 32), "output_layer": (32, 32), "residual_layer": (64, 32)}.items()},
    **{f"tokenizer/{name}/bias": (32,) for name in ("hidden_layer", "output_layer", "residual_layer")},
    **{f"output_projection_{head}/{name}/kernel": (32, width if name != "hidden_layer" else 32)
       for head, width in {"point": 1280, "quantiles": 640}.items()
       for name in ("hidden_layer", "output_layer", "residual_layer")},
}  # fmt: skip
LAYER = {
    **{f"attn/{name}/kernel": (32, 4, 8) for name in ("query", "key", "value")},
    "attn/out/kernel": (4, 8, 32),
    **{f"attn/{name}": (8,) for name in ("query_ln/scale", "key_ln/scale", "per_dim_scale/per_dim_scale")},
    **{f"{name}/kernel": (32, 32) for name in ("ff0", "ff1")},
    **{f"{name}/scale": (32,) for name in ("pre_attn_ln", "post_attn_ln", "pre_ff_ln", "post_ff_ln")},
}


def timesfm() -> dict[str, Any]:
    """Return the pytree, as flax nnx saves it."""
    shapes = {**TIMESFM, **{f"stacked_xf/{name}": (TIMESFM_LAYERS, *shape) for name, shape in LAYER.items()}}
    rng, made = np.random.default_rng(0), dict[str, Any]()
    for name, shape in shapes.items():
        node = made
        for key in name.split("/"):
            node = node.setdefault(key, {})
        node["value"] = rng.standard_normal(shape, np.float32) / math.sqrt(shape[-1])
    return made


def main() -> None:
    import orbax.checkpoint as ocp

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    SIZES["small"] = GEMMA
    scratch = Scratch(Path(tempfile.gettempdir()))
    for name, make in {"timesfm": timesfm, "gemma": lambda: tree("small", "nested", "float32", scratch)}.items():
        if not (options.folder / name).exists():
            ocp.PyTreeCheckpointer().save((options.folder / name).absolute(), make())
    with tempfile.TemporaryDirectory() as out:
        files = {name: Path(out) / f"{name}.yaml" for name in REFERENCES}
        commands = {name: _command(name, options.folder / name, file) for name, file in files.items()}
        runs = alternate(commands, options.rounds, files.values())
    result = {
        "machine": machine(),
        "load_before": round(os.getloadavg()[0], 2),
        "runs": {name: of.summary() for name, of in runs.items()},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(f"{text}\n")


def _command(name: str, checkpoint: Path, out: Path) -> list[str]:
    given = [word for setting in SETTINGS[name].split() for word in ("--set", setting)]
    shrink = [word for size in SHRINK[name].split() for word in ("--shrink", size)]
    call = ["infer", str(checkpoint), str(out), "--reference", REFERENCES[name]]
    return [sys.executable, "-c", PROGRAM, *call, *given, *shrink]


if __name__ == "__main__":
    main()
