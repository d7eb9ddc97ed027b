"""One Gemma 3 in the trees of Tunix and of MaxText, converted by orbaxport, MaxText and `convert`, and what `convert check` says of each.

    pip install -e '.[test]'                                             # the environment that runs this
    pip install --no-deps --target /some/folder orbaxport==1.3.0
    ORBAXPORT=/some/folder MAXTEXT=/env/of/make_maxtext/bin/python python benchmarks/gemma_converters.py > benchmarks/results/gemma-converters.txt

The checkpoints are golden cases of the tests (tests/golden/README.md): random weights of toy sizes that Tunix's and MaxText's own models ran.
Tunix's is saved here as its CheckpointManager does; MaxText's was written by MaxText. No time is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import convert
from convert.verify.run import check

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
LEVELS = ("coverage", "weights", "layers")
SHOWN = 4  # findings of a level
# MaxText writes these two facts of the published model for a model of toy sizes, too.
PUBLISHED = {"sliding_window": 1024, "query_pre_attn_scalar": 256}
TO_HUGGINGFACE = """
import sys, types
sys.path.insert(0, "tests/golden")
import make_maxtext as m
from absl import flags
name, _, changes = m.CASES["gemma3-unscanned"]
argv = m.configured(name, changes)
flags.FLAGS(["benchmark", "--override_model_architecture"])
m.to_huggingface.gc = types.SimpleNamespace(collect=lambda: None)
m.to_huggingface.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_, **__: None)
items = m.HERE / "gemma3-unscanned" / "ckpt" / "0" / "items"
m.to_huggingface.main([*argv, f"load_parameters_path={items}", f"base_output_directory={sys.argv[1]}"])
"""


def tunix_checkpoint(folder: Path) -> Path:
    """Save the golden as Tunix's CheckpointManager does: the item `model_params` of a step."""
    import orbax.checkpoint as ocp

    from support import tunix

    tree: dict[str, Any] = {}
    for name, leaf in tunix.GOLD.leaves(tunix.CASE).items():
        *parents, last = name.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    with ocp.CheckpointManager(folder, item_names=("model_params",)) as manager:
        manager.save(1, args=ocp.args.Composite(model_params=ocp.args.PyTreeSave(tree)))
    return folder / "1"


def orbaxport(checkpoint: Path, out: Path, *options: str) -> None:
    """Run orbaxport's command line, with the names of Gemma 3."""
    command = [
        sys.executable,
        "-m",
        "orbaxport",
        "-i",
        str(checkpoint),
        "-o",
        str(out),
        "--hf-folder",
        "--key-map",
        "gemma3",
    ]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.environ["ORBAXPORT"]}
    subprocess.run([*command, "--dtype", "float32", *options], env=env, check=True, capture_output=True)


def maxtext(out: Path) -> None:
    """Run MaxText's `to_huggingface` on its golden."""
    out.mkdir()
    subprocess.run([os.environ["MAXTEXT"], "-c", TO_HUGGINGFACE, str(out)], cwd=ROOT, check=True, capture_output=True)


def text_names(out: Path, renamed: Path) -> None:
    """Copy weights with the names of `Gemma3ForCausalLM`."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(out / "model.safetensors")
    save_file({name.replace("model.language_model.", "model."): x for name, x in tensors.items()}, renamed)


def report(title: str, out: Path, checkpoint: Path, model: str, settings: dict[str, Any]) -> None:
    """Print what `convert check` says: the verdict of each level, and the first findings."""
    print(f"\n## {title}")
    for level in check(out, checkpoint, model=model, settings=settings, levels=list(LEVELS)).levels:
        print(f"{level.level}: {level.verdict.value}{f' ({level.reason})' if level.reason else ''}")
        for finding in level.findings[:SHOWN]:
            print(f"  - {str(finding).replace(str(out), 'OUT')[:420]}")
        if len(level.findings) > SHOWN:
            print(f"  and {len(level.findings) - SHOWN} more")


def main() -> None:
    from support import maxtext as maxtext_cases
    from support import tunix

    golden = maxtext_cases.checkpoint("gemma3-unscanned")
    theirs = {**maxtext_cases.settings("gemma3-unscanned"), **PUBLISHED}
    print("orbaxport 1.3.0, maxtext 0.2.5")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        step = tunix_checkpoint(folder / "tunix")
        orbaxport(step, folder / "a", "--transpose")
        report("Tunix's tree, orbaxport --transpose", folder / "a", step, "tunix-gemma3", tunix.SET)
        orbaxport(step, folder / "b")
        report("Tunix's tree, orbaxport", folder / "b", step, "tunix-gemma3", tunix.SET)
        convert.convert("tunix-gemma3", step, folder / "c", settings=tunix.SET)
        report("Tunix's tree, convert", folder / "c", step, "tunix-gemma3", tunix.SET)
        maxtext(folder / "d")
        report("MaxText's tree, to_huggingface", folder / "d", golden, "maxtext-gemma3", theirs)
        text_names(folder / "d", folder / "d.safetensors")
        report("MaxText's tree, to_huggingface: the tensors by the names of the text model", folder / "d.safetensors", golden, "maxtext-gemma3", theirs)  # fmt: skip
        convert.convert("maxtext", golden, folder / "e", settings=theirs)
        report("MaxText's tree, convert", folder / "e", golden, "maxtext-gemma3", theirs)


if __name__ == "__main__":
    main()
