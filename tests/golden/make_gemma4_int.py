"""Writes the golden cases of Gemma 4 and Gemma 3n with quantised weights: gemma 4.0.1, in the environment of `make_gemma4.py`.

    PYTHONPATH=src:tests python tests/golden/make_gemma4_int.py

Each case is gemma4-int/CASE.npz, as those of `make_gemma4.py`, and gemma4-int/CASE, what Orbax saved of `peft.quantize`'s integers and scales.
`peft.quantize` takes Gemma 3's shapes apart by their sizes and stops at a bare tree of these models, also at the tree of 26B-A4B; below `params`
it scales by the last axis. `IntWrapper` puts its integers in place of Gemma 3's matrices alone, and leaves these models as they are: the logits
are those of the Transformer from the integers divided by the scales, the line by which `_IntEinsum` makes its kernel. XLA rounds one of eight of
these quotients otherwise than IEEE 754 does; the outputs in float64 are those of NumPy's quotients, rounded to float32.
`qat.json` has the names that `convert_to_qat_checkpoint` (`load_params(quantize=True)`) gives to the leaves.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gemma
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict, unflatten_dict
from make_gemma3_vision import _stand_in_for_kauldron
from make_gemma4 import CASES as PLAIN
from make_gemma4 import HERE as PLAIN_FOLDER
from make_gemma4 import LAYERS, PATTERN, SIZES, transformer

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

HERE = PLAIN_FOLDER.parent / "gemma4-int"
CASES = ("gemma3n-int4", "gemma3n-int8", "gemma4-e2b-int4", "gemma4-e4b-int8", "gemma4-31b-int4")


def of_training(leaves: dict[str, Any]) -> dict[str, str]:
    """Return upstream's names of the leaves in a tree of quantisation-aware training, for each plain name."""
    place = Path(gemma.__path__[0], "gm", "ckpts", "_quantization.py")  # its package imports all of kauldron
    spec = importlib.util.spec_from_file_location("of_training", place)
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    plain = {id(x): name for name, x in leaves.items()}
    made = flatten_dict(code.convert_to_qat_checkpoint(unflatten_dict(leaves, sep="/")), sep="/")
    return {plain[id(x)]: name for name, x in made.items()}


def divided(leaves: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves of the plain tree: as gm/nn/_quantization.py, `_IntEinsum`, makes its kernel."""
    found = {}
    for name, x in leaves.items():
        place, _, last = name.rpartition("/")
        above, _, module = place.rpartition("/")
        if not module.startswith("_IntEinsum_"):
            found[name] = x
        elif last == "kernel":
            of = module.removeprefix("_IntEinsum_")
            found[f"{above}/{'w' if of == '0' else of}"] = x.astype(np.float32) / leaves[f"{place}/scale"]
    return found


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    _stand_in_for_kauldron()
    from gemma import peft

    names = ("gemma", "flax", "orbax-checkpoint", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    tokens = np.random.default_rng(53).integers(1, SIZES["num_embed"], (2, 12)).astype(np.int32)
    for case in CASES:
        of, _, bits = case.rpartition("-")
        config = PLAIN[of] if of == "gemma3n" else {**SIZES, **PLAIN[of]}
        model = transformer(of, config)
        tree = flatten_dict(jax.eval_shape(lambda model=model: model.init(jax.random.key(0), tokens))["params"], sep="/")  # fmt: skip
        plain = {name: jnp.asarray(drawn(f"{case}/{name}", leaf.shape)) for name, leaf in tree.items()}
        params = peft.quantize({"params": unflatten_dict(plain, sep="/")}, method=bits)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(HERE / case, params)
        # Orbax writes the absolute path into this file, whose presence alone counts.
        (HERE / case / "commit_success.txt").write_text("Checkpoint commit was successful.")
        with ocp.StandardCheckpointer() as checkpointer:
            read = flatten_dict(checkpointer.restore(HERE / case, params)["params"], sep="/")

        def logits(leaves: Any, tokens: Any, model: Any = model) -> Any:
            return model.apply({"params": unflatten_dict(leaves, sep="/")}, tokens).logits

        leaves = divided(read)
        assert leaves.keys() == plain.keys()
        rounded = np.asarray(logits(leaves, tokens))
        with float64():
            exact = np.asarray(lift(logits)(divided({name: np.asarray(x) for name, x in read.items()}), tokens))
        DrawnCases(HERE).save(
            case, {**config, "layers": LAYERS, "pattern": PATTERN}, {}, {"tokens": tokens}, {"logits": rounded}, {"logits": exact}
        )  # fmt: skip
        before = np.abs(np.asarray(logits(plain, tokens)) - rounded).max() / np.abs(rounded).max()
        print(f"{case}: {len(read)} leaves, logits {np.abs(exact).mean():.2f} on average; {before:.2f} from those of the weights before rounding")  # fmt: skip
    plain_cases = DrawnCases(PLAIN_FOLDER)
    qat = {of: of_training({name: jnp.asarray(x) for name, x in plain_cases.leaves(of).items()}) for of in PLAIN}
    (HERE / "qat.json").write_text(json.dumps(qat, indent=0))


if __name__ == "__main__":
    main()
