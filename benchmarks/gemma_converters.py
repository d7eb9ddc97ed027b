"""One Gemma 3 1B in three layouts, each converted by orbaxport, MaxText and `convert`: time, memory, and what `convert check` says.

    pip install -e '.[test]'                                             # the environment that runs this
    pip install --no-deps --target /some/folder orbaxport==1.3.0
    ORBAXPORT=/some/folder MAXTEXT=/env/of/make_maxtext/bin/python python benchmarks/gemma_converters.py FOLDER

The weights are random bfloat16 numbers of the published shapes (`checkpoints.py`): the same in the layouts of the gemma package, of Tunix (saved
as its CheckpointManager does) and of MaxText (saved by MaxText; rounded once more, see `gemma_layouts.py`). MaxText's exporter asks the Hub for a
tokenizer, and for a garbage collection after each tensor: both are left out. The rest runs as on the command line. FOLDER needs 14 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import gemma_layouts
from checkpoints import SIZES
from measuring import Runs, machine, measure, settle

HERE = Path(__file__).parent
LEVELS = ["coverage", "weights", "layers"]
SHOWN = 4  # findings of a level
ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception)\b")
# Facts of the published 1B that no weight holds: MaxText has no configuration of that size.
FACTS = {"context_length": 32768, "sliding_window": 512, "query_pre_attn_scalar": 256, "rope_factor_global": 1.0}
SAVE = """
import sys
import gemma_layouts, jax
from maxtext.common import checkpointing
from maxtext.configs import pyconfig
size, folder, out, *argv = sys.argv[1:]
config = pyconfig.initialize_pydantic(["save", *argv])
tree = jax.tree.map(jax.numpy.asarray, gemma_layouts.maxtext(gemma_layouts.weights(size, folder)))
manager = checkpointing.create_orbax_checkpoint_manager(out, True, False, 1)
checkpointing.save_checkpoint(manager, 0, tree, config=config, force=True)
checkpointing.wait_until_finished(manager)
"""
TO_HUGGINGFACE = """
import gc, runpy, types
import transformers
gc.collect = lambda *_: 0
transformers.AutoTokenizer = transformers.AutoProcessor = types.SimpleNamespace(from_pretrained=lambda *_, **__: None)
runpy.run_module("maxtext.checkpoint_conversion.to_huggingface", run_name="__main__", alter_sys=True)
"""


def in_maxtext(code: str) -> str:
    """Return what a line of Python prints in MaxText's environment."""
    command = [os.environ["MAXTEXT"], "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of the other converters, and what MaxText runs in."""
    code = "from importlib.metadata import version as v; print(*map(v, ('maxtext', 'jax', 'transformers')))"
    taken = zip(("maxtext", "jax of maxtext", "transformers of maxtext"), in_maxtext(code).split(), strict=True)
    return {x.name: x.version for x in distributions(path=[os.environ["ORBAXPORT"]])} | dict(taken)


def maxtext_options(size: str) -> list[str]:
    """Return MaxText's command line for a Gemma 3 of these sizes: it has no configuration of the 1B, so that of the 4B is given other sizes."""
    layers, width, heads, kv_heads, head, hidden, vocabulary = SIZES[size]
    folder = in_maxtext("import importlib.util as u; print(u.find_spec('maxtext').submodule_search_locations[0])")
    options = {
        "model_name": "gemma3-4b", "override_model_config": True, "base_num_decoder_layers": layers, "base_emb_dim": width,
        "base_num_query_heads": heads, "base_num_kv_heads": kv_heads, "head_dim": head, "base_mlp_dim": hidden, "vocab_size": vocabulary,
        "sliding_window_size": FACTS["sliding_window"], "rope_linear_scaling_factor": FACTS["rope_factor_global"], "scan_layers": False,
        "dtype": "bfloat16", "weight_dtype": "bfloat16", "attention": "dot_product", "hardware": "cpu", "skip_jax_distributed_system": True,
        "run_name": "benchmark", "enable_checkpointing": False, "sharding_tolerance": 1.0,
    }  # fmt: skip
    return [f"{folder}/configs/base.yml", *(f"{key}={value}" for key, value in options.items())]


def checkpoints(size: str, folder: Path) -> dict[str, Path]:
    """Save the same weights in each layout; return their paths."""
    import orbax.checkpoint as ocp

    made = {"gemma": folder / "gemma", "Tunix": folder / "tunix" / "1", "MaxText": folder / "maxtext" / "0"}
    if not made["gemma"].exists():
        command = [sys.executable, str(HERE / "checkpoints.py"), str(made["gemma"]), "--size", size]
        subprocess.run(command, check=True)
    if not made["Tunix"].exists():
        tree = gemma_layouts.tunix(gemma_layouts.weights(size, folder))
        with ocp.CheckpointManager(folder / "tunix", item_names=("model_params",)) as manager:
            manager.save(1, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(tree)))
    if not made["MaxText"].exists():
        command = [
            os.environ["MAXTEXT"],
            "-c",
            SAVE,
            size,
            str(folder),
            str(folder / "maxtext"),
            *maxtext_options(size),
        ]
        environment = os.environ | {"PYTHONPATH": str(HERE), "JAX_PLATFORMS": "cpu"}
        subprocess.run(command, check=True, env=environment)
    return made


def commands(layout: str, checkpoint: Path, out: Path, size: str) -> dict[str, list[str]]:
    """Return the command of each converter for a checkpoint."""
    orbaxport = [
        "env", f"PYTHONPATH={os.environ['ORBAXPORT']}", "JAX_PLATFORMS=cpu", sys.executable, "-m", "orbaxport", "-i", str(checkpoint),
        "-o", str(out), "--hf-folder", "--key-map", "gemma3", *(["--item", "items"] if layout == "MaxText" else []),
    ]  # fmt: skip
    items = {"gemma": checkpoint, "Tunix": checkpoint / "model_params", "MaxText": checkpoint / "items"}[layout]
    maxtext = [
        os.environ["MAXTEXT"], "-c", TO_HUGGINGFACE, *maxtext_options(size), f"load_parameters_path={items}",
        f"base_output_directory={out}", "--override_model_architecture",
    ]  # fmt: skip
    ours = [sys.executable, "-m", "convert", model(layout), str(checkpoint), str(out), *settings_of(layout, size)]
    return {
        "orbaxport": orbaxport,
        "orbaxport --transpose": [*orbaxport, "--transpose"],
        "to_huggingface": maxtext,
        "convert": ours,
    }


def model(layout: str) -> str:
    """Return the rules that `convert` has for a layout."""
    return {"gemma": "gemma3", "Tunix": "tunix-gemma3", "MaxText": "maxtext-gemma3"}[layout]


def settings(layout: str, size: str) -> dict[str, Any]:
    """Return what has to be said of a layout: nothing, where the sizes are published ones."""
    if size == "1b" and layout != "MaxText":
        return {}
    return FACTS | ({} if layout == "Tunix" else {"vocab_size": SIZES[size][-1]})


def settings_of(layout: str, size: str) -> list[str]:
    return [word for key, value in settings(layout, size).items() for word in ("--set", f"{key}={value}")]


def run(command: list[str], out: Path, rounds: int) -> tuple[Runs, str]:
    """Run a converter, and one time before that is not measured if there are several; return the measurements, and the error if it ends with one."""
    runs = Runs()
    for round_ in range(rounds + (rounds > 1)):
        shutil.rmtree(out, ignore_errors=True)
        settle(out.parent, most=5)
        try:
            measure(command, runs if round_ or rounds == 1 else None)
        except SystemExit as failed:
            lines = [line.strip() for line in str(failed).splitlines() if line.strip()]
            return runs, next((line for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1])
    return runs, ""


def checked(out: Path, checkpoint: Path, layout: str, size: str) -> dict[str, Any]:
    """Return what `convert check` says: the verdict of each level, and its first findings."""
    from convert.verify.run import check

    said = {}
    for level in check(out, checkpoint, model=model(layout), settings=settings(layout, size), levels=LEVELS).levels:
        findings = [str(x).replace(f"{out.parent}/", "").replace(str(out.parent), "")[:420] for x in level.findings]
        more = [f"and {len(findings) - SHOWN} more"] if len(findings) > SHOWN else []
        said[level.level] = {
            "verdict": level.verdict.value,
            "reason": level.reason,
            "findings": findings[:SHOWN] + more,
        }
    return said


def compared(out: Path, first: Path) -> dict[str, Any]:
    """Return how many tensors are equal bit for bit, and the largest difference of the others, relative to the largest value of the tensor."""
    from safetensors.torch import load_file

    ours, other = load_file(out / "model.safetensors"), load_file(first / "model.safetensors")
    assert ours.keys() == other.keys()
    apart = {name: x for name, x in ours.items() if not x.equal(other[name])}
    errors = (
        ((x - other[name]).float().abs().max() / other[name].float().abs().max()).item() for name, x in apart.items()
    )
    return {"equal": len(ours) - len(apart), "of": len(ours), "largest difference": max(errors, default=0.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default="", help="converters whose name has this text; the other rows of the results are kept"
    )
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    written = HERE / "results" / "gemma-converters.json"
    kept = json.loads(written.read_text())["runs"] if options.only else {}
    results: dict[str, Any] = {"machine": machine() | versions(), "size": options.size, "runs": kept}
    for layout, checkpoint in checkpoints(options.size, folder).items():
        for name, command in commands(layout, checkpoint, folder / "out", options.size).items():
            if options.only in f"{layout}: {name}":
                row = measured(command, name, layout, checkpoint, options)
                results["runs"][f"{layout}: {name}"] = row
                print(f"{layout}: {name}", json.dumps(row)[:300], flush=True)
                written.write_text(json.dumps(results, indent=1) + "\n")


def measured(
    command: list[str], name: str, layout: str, checkpoint: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return the row of a converter and a layout."""
    out: Path = options.folder.resolve() / "out"
    runs, error = run(command, out, options.rounds)
    if error:
        return {"error": error.replace(str(out.parent), "")[:420]}
    row = runs.summary() | {"check": checked(out, checkpoint, layout, options.size)}
    if name != "convert":
        return row
    first = out.parent / "first"  # what the published layout gives
    if layout == "gemma":
        shutil.copytree(out, first, dirs_exist_ok=True)
    return row | {"as the tensors of the gemma layout": compared(out, first)}


if __name__ == "__main__":
    main()
