"""Writes flax-families/FROM_FLAX.json: the tensors that `from_flax=True` of transformers 4 makes of the cases, beside those of `convert`.

    env/bin/pip install tensorstore msgpack 'typer<0.29' rich jinja2 pyyaml xxhash zstandard rapidfuzz          # into the environment of make_flax_families.py
    PYTHONPATH=src:tests env/bin/python tests/golden/make_from_flax.py [CASE ...]

Of each case: the digest of the converted file, and the names of its tensors that are not, bit for bit, those of transformers 4's state_dict; or
the error of transformers 4. Three classes have other names since transformers 5, which RENAMED lists.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import transformers
from make_flax_families import HERE, cases, patched
from safetensors.numpy import load_file

import convert
from support import flax_families

RENAMED = (  # in transformers 5, in transformers 4
    *((f"attention.{new}_proj", f"attention.attention.{old}") for new, old in (("q", "query"), ("k", "key"), ("v", "value"))),
    ("attention.o_proj", "attention.output.dense"),
    *((f"vision_model.{part}", f"vision_model.vision_model.{part}") for part in ("embeddings", "encoder", "pre", "post")),
    *((part, f"{tower}.{part}") for tower in ("text_model", "vision_model") for part in ("embeddings", "encoder", "pre", "post", "final")),
)  # fmt: skip


def named(name: str, found: dict[str, Any]) -> Any:
    """Return the tensor of transformers 4 that has this name today."""
    before = (name, *(name.replace(new, old, 1) for new, old in RENAMED if new in name))
    return next((found[other] for other in before if other in found), None)


def compared(case: Any, folder: Path) -> dict[str, Any]:
    source = flax_families.write(case.name, folder / "source")
    convert.convert("flax-transformers", source, folder / "out")
    ours = load_file(folder / "out" / "model.safetensors")
    said: dict[str, Any] = {"tensors": flax_families.digest(ours)}
    cls = getattr(transformers, {"BertForCausalLM": "BertLMHeadModel"}.get(case.model, case.model))
    try:
        peer = cls.from_pretrained(source, from_flax=True).state_dict()
    except AttributeError as error:
        return said | {"error": f"{type(error).__name__}: {error}"}
    theirs = {name: x.numpy() for name, x in peer.items()}
    pairs = {name: (x, named(name, theirs)) for name, x in ours.items()}
    differ = [name for name, (x, y) in pairs.items() if y is None or x.shape != y.shape or x.tobytes() != y.tobytes()]
    return said | {"differ": sorted(differ)}


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    patched()
    written = HERE / "FROM_FLAX.json"
    made = json.loads(written.read_text()) if written.exists() else {}
    for case in cases():
        if sys.argv[1:] and case.name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            made[case.name] = compared(case, Path(folder))
        print(case.name, made[case.name].get("error") or len(made[case.name]["differ"]), flush=True)
    written.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
