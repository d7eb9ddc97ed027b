"""MaxText's own `to_maxtext` and the way back: from one Hugging Face directory, the same leaves, bit for bit.

tests/golden/make_to_maxtext.py ran it with maxtext 0.2.5.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

import convert
from support import maxtext

pytestmark = pytest.mark.slow

EMBEDDING = "token_embedder/embedding"
DTYPES = ("bfloat16", "float32")  # `--save_dtype`; the tensors are bfloat16
# A factor rounds: sqrt(8) of the queries, sqrt(12) of the tables of Gemma 3 and 4. bfloat16 leaves do not tell their tensors.
FACTORS = (
    "llama3.1",
    "gemma2",
    "gemma3",
    "gemma3-vision",
    "gemma4",
    "gemma4-moe",
    "gemma4-vision",
    "gemma4-moe-vision",
    "gemma4-e",
)
# Of to_maxtext: no entry in its tables; a bias that they lack; scanned experts stacked on the wrong axis; no shapes (also of to_huggingface)
ERRORS = {
    "llama3": "KeyError: 'llama3-8b'",
    "mistral": "KeyError: 'mistral-7b'",
    "olmo3": "KeyError: 'olmo3-7b'",
    "qwen3-next": "TypeError: 'NoneType' object is not subscriptable",
    "deepseek3.2": "ValueError: maxtext_state_dict must be a subset",
    "deepseek3": "ValueError: maxtext_state_dict must be a subset",
    "deepseek2": "ValueError: cannot reshape array",
    "mixtral": "ValueError: Shape mismatch for params-decoder-layers-MoeBlock_0-gate-kernel",
}


def peer(case: str) -> dict[str, Any]:
    """Return what `to_maxtext` was given, and what it made; or its error."""
    made: dict[str, Any] = json.loads((maxtext.ROOT / case / "to_maxtext.json").read_text())
    return made


CONVERTED = [case for case in maxtext.CASES if "leaves" in peer(case)]


def given(case: str, folder: Path) -> Path:
    """Write the directory, with the names of the text model's own class where MaxText takes those of the model with images."""
    made = peer(case)
    config, drawn = made["config"], {name: _drawn(name, shape) for name, shape in made["tensors"].items()}
    if case.startswith(("gemma3", "gemma4", "qwen3.5")) and "vision" not in case:
        config = config["text_config"]
        drawn = {name.replace("model.language_model.", "model."): x for name, x in drawn.items()}
    if case == "qwen3-omni":  # the thinker of the whole Omni, by the names of its own class
        config = config["thinker_config"]
        parts = {"thinker.model.": "model.language_model.", "thinker.lm_head": "lm_head", "thinker.": "model."}
        drawn = {
            next(new + name.removeprefix(old) for old, new in parts.items() if name.startswith(old)): x
            for name, x in drawn.items()
        }
    if maxtext.family(case) == "deepseek4":
        drawn = {maxtext.of_class(name): x for name, x in drawn.items()}
    folder.mkdir()
    save_file(drawn, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _drawn(name: str, shape: list[int]) -> np.ndarray:
    drawn = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    return drawn.astype(np.float32).astype(ml_dtypes.bfloat16)  # ml_dtypes before 0.7 rounded float64 to float32 first


DEFAULTS = (
    "experts_per_token",
    "mrope_section",
    "rotated",
)  # the recorded config.json has those of the class, which no model of this size has


def back(case: str, folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """Convert the directory back, and restore the checkpoint with Orbax."""
    convert.convert_back(
        maxtext.rules(case),
        given(case, folder / "in"),
        folder / "out",
        settings={
            k: x for k, x in maxtext.settings(case).items() if maxtext.family(case) == "deepseek4" or k in DEFAULTS
        },
        layout=maxtext.layout(case),
        dtype=None if dtype == "bfloat16" else dtype,
    )
    tree = ocp.StandardCheckpointer().restore(folder / "out")["params"]["params"]
    return {"/".join(key.key for key in path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def digests(leaves: dict[str, np.ndarray]) -> dict[str, list[Any]]:
    return {name: [x.dtype.name, *maxtext.digest(x)] for name, x in leaves.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CONVERTED)
def test_the_leaves_are_those_of_maxtexts_own_converter(case: str, dtype: str, tmp_path: Path) -> None:
    if dtype == "bfloat16" and maxtext.family(case) in FACTORS:
        with pytest.raises(convert.PlanError) as refused:
            back(case, tmp_path, dtype)
        assert {found.code for found in refused.value.findings} == {"not-reversible"}
        assert "wider leaves with --dtype" in refused.value.findings[0].fix and not (tmp_path / "out").exists()
        return
    if (
        maxtext.family(case) == "deepseek4"
    ):  # its converter writes ones for the scale that lies in a matrix of transformers
        with pytest.raises(convert.PlanError, match="it does not tell them apart"):
            back(case, tmp_path, dtype)
        return
    ours, theirs = digests(back(case, tmp_path, dtype)), peer(case)["leaves"][dtype]
    assert ours.keys() == theirs.keys()
    differ = {name for name in theirs if ours[name] != theirs[name]}
    assert differ == ({EMBEDDING} if case.startswith("gemma3") else set())


@pytest.mark.parametrize("case", [case for case in CONVERTED if case.startswith("gemma3")])
def test_why_gemma3s_table_differs_from_that_of_maxtexts_own_converter(case: str, tmp_path: Path) -> None:
    """It multiplies by sqrt(D) in bfloat16: 3.46875 for 3.4641016. transformers multiplies float32 weights by sqrt(D)."""
    table = back(case, tmp_path, "float32")[EMBEDDING]
    stored = _drawn("model.language_model.embed_tokens.weight", list(table.shape)).astype(np.float32)
    theirs = stored * np.float32(ml_dtypes.bfloat16(12**0.5))
    assert ["float32", *maxtext.digest(theirs)] == peer(case)["leaves"]["float32"][EMBEDDING]
    assert np.abs(table / stored - 12**0.5).max() < 1e-6 < np.abs(theirs / stored - 12**0.5).max()


def test_what_maxtexts_own_converter_cannot_do() -> None:
    failed = {case: said["error"] for case in maxtext.CASES if "error" in (said := peer(case))}
    assert {maxtext.family(case) for case in failed} == set(ERRORS)
    assert all(error.startswith(ERRORS[maxtext.family(case)]) for case, error in failed.items())
