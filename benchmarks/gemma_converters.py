"""Gemma 3 in the trees of Tunix and of MaxText, each converted by orbaxport, MaxText and `convert`, and what `convert check` says.

    pip install -e '.[test]'                                             # the environment that runs this
    pip install --no-deps --target /some/folder orbaxport==1.3.0
    ORBAXPORT=/some/folder MAXTEXT=/env/of/make_maxtext/bin/python python benchmarks/gemma_converters.py > benchmarks/results/gemma-converters.txt

The checkpoints are golden cases of the tests (tests/golden/README.md): random weights of toy sizes that Tunix's and MaxText's own models ran.
Tunix's is saved here as its CheckpointManager does, MaxText's by MaxText. No time is measured.
"""

from __future__ import annotations

import json
import os
import re
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
ERROR_LINE = re.compile(r"(\w+\.)*\w*(Error|Exception)\b")
# The sizes of Tunix's golden case, as MaxText's command line has them.
TUNIX_SIZES = {
    "base_emb_dim": 16, "base_num_query_heads": 4, "base_num_kv_heads": 2, "base_mlp_dim": 24, "head_dim": 4, "vocab_size": 40,
    "base_num_decoder_layers": 7, "scan_layers": False, "sliding_window_size": 4,
}  # fmt: skip
# MaxText writes these two facts of the published model for a model of toy sizes, too.
PUBLISHED = {"sliding_window": 1024, "query_pre_attn_scalar": 256}
# The golden case without the files that no reader of ours needs, and orbaxport does: MaxText writes it again.
SAVE = """
import sys
sys.path.insert(0, "tests/golden")
import make_maxtext as m
name, _, changes = m.CASES["gemma3-unscanned"]
config = m.pyconfig.initialize_pydantic(m.configured(name, changes))
items, reader = m.HERE / "gemma3-unscanned" / "ckpt" / "0" / "items", m.ocp.PyTreeCheckpointer()
known = reader.metadata(items).item_metadata.tree
arrays = m.jax.tree.map(lambda _: m.ocp.RestoreArgs(restore_type=m.np.ndarray), known)
tree = m.jax.tree.map(m.jnp.asarray, reader.restore(items, restore_args=arrays))
manager = m.checkpointing.create_orbax_checkpoint_manager(sys.argv[1], True, False, 1)
m.checkpointing.save_checkpoint(manager, 0, tree, config=config, force=True)
m.checkpointing.wait_until_finished(manager)
"""
TO_HUGGINGFACE = """
import json, sys, types
sys.path.insert(0, "tests/golden")
import make_maxtext as m
from absl import flags
name, _, changes = m.CASES["gemma3-unscanned"]
argv = m.configured(name, changes | json.loads(sys.argv[3]))
flags.FLAGS(["benchmark", "--override_model_architecture"])
m.to_huggingface.gc = types.SimpleNamespace(collect=lambda: None)
m.to_huggingface.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_, **__: None)
m.to_huggingface.main([*argv, f"load_parameters_path={sys.argv[2]}", f"base_output_directory={sys.argv[1]}"])
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


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error that a converter ended with; empty where it wrote something."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return next((x for x in reversed(lines) if ERROR_LINE.match(x)), lines[-1]) if done.returncode else ""


def orbaxport(checkpoint: Path, out: Path, *options: str) -> str:
    """Run orbaxport's command line, with the names of Gemma 3; return its error."""
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
    return said(subprocess.run([*command, "--dtype", "float32", *options], env=env, capture_output=True, text=True))


def maxtext(checkpoint: Path, out: Path, sizes: dict[str, Any]) -> str:
    """Run MaxText's `to_huggingface` as for its golden, with other sizes; return its error."""
    out.mkdir()
    command = [os.environ["MAXTEXT"], "-c", TO_HUGGINGFACE, str(out), str(checkpoint), json.dumps(sizes)]
    return said(subprocess.run(command, cwd=ROOT, capture_output=True, text=True))


def text_names(out: Path, renamed: Path) -> None:
    """Copy weights with the names of `Gemma3ForCausalLM`."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(out / "model.safetensors")
    save_file({name.replace("model.language_model.", "model."): x for name, x in tensors.items()}, renamed)


def report(title: str, out: Path, checkpoint: Path, model: str, settings: dict[str, Any], error: str = "") -> None:
    """Print what `convert check` says: the verdict of each level, and the first findings; or the error of the converter."""
    print(f"\n## {title}")
    if error:
        print(f"nothing was written: {error.replace(str(checkpoint), 'CKPT')[:420]}")
        return
    for level in check(out, checkpoint, model=model, settings=settings, levels=list(LEVELS)).levels:
        print(f"{level.level}: {level.verdict.value}{f' ({level.reason})' if level.reason else ''}")
        for finding in level.findings[:SHOWN]:
            print(f"  - {str(finding).replace(str(out), 'OUT')[:420]}")
        if len(level.findings) > SHOWN:
            print(f"  and {len(level.findings) - SHOWN} more")


def main() -> None:
    from support import maxtext as maxtext_cases
    from support import tunix

    theirs = {**maxtext_cases.settings("gemma3-unscanned"), **PUBLISHED}
    print("orbaxport 1.3.0, maxtext 0.2.5")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        step = tunix_checkpoint(folder / "tunix")
        error = orbaxport(step, folder / "a", "--transpose")
        report("Tunix's tree, orbaxport --transpose", folder / "a", step, "tunix-gemma3", tunix.SET, error)
        error = orbaxport(step, folder / "b")
        report("Tunix's tree, orbaxport", folder / "b", step, "tunix-gemma3", tunix.SET, error)
        error = maxtext(step / "model_params", folder / "f", TUNIX_SIZES)
        report("Tunix's tree, to_huggingface", folder / "f", step, "tunix-gemma3", tunix.SET, error)
        convert.convert("tunix-gemma3", step, folder / "c", settings=tunix.SET)
        report("Tunix's tree, convert", folder / "c", step, "tunix-gemma3", tunix.SET)
        golden = folder / "maxtext"
        subprocess.run([os.environ["MAXTEXT"], "-c", SAVE, str(golden)], cwd=ROOT, check=True, capture_output=True)
        for name, options in {"orbaxport --transpose": ["--transpose"], "orbaxport": []}.items():
            error = orbaxport(golden / "0", folder / name, "--item", "items", *options)
            report(f"MaxText's tree, {name}", folder / name, golden, "maxtext-gemma3", theirs, error)
        error = maxtext(golden / "0" / "items", folder / "d", {})
        report("MaxText's tree, to_huggingface", folder / "d", golden, "maxtext-gemma3", theirs, error)
        text_names(folder / "d", folder / "d.safetensors")
        report("MaxText's tree, to_huggingface: the tensors by the names of the text model", folder / "d.safetensors", golden, "maxtext-gemma3", theirs)  # fmt: skip
        convert.convert("maxtext", golden, folder / "e", settings=theirs)
        report("MaxText's tree, convert", folder / "e", golden, "maxtext-gemma3", theirs)


if __name__ == "__main__":
    main()
