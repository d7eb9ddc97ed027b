"""Writes the golden cases of Gemma 4 with its vision and audio towers: the flax code of gemma 4.0.1, on a CPU.

The environment is that of `make_gemma4.py`:

    PYTHONPATH=src:tests python tests/golden/make_gemma4_towers.py [CASE ...]

Each case is one file, gemma4-towers/CASE.npz, as those of `make_gemma4.py`. Images fill all patches, or, for `padded_tokens`, some of them.
The mel filterbank has no weights: its features are an input of both sides. The second
clip is the first, cut.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from make_gemma3_vision import _stand_in_for_kauldron
from make_gemma4 import CASES as TEXT
from make_gemma4 import SIZES, transformer

from convert.numerics.lift_jax import float64, lift
from support.drawn_cases import DrawnCases, drawn

HERE = Path(__file__).parent / "gemma4-towers"
IMAGE, SOUND = -2, -4  # gm/vision/_token_utils.py
TOKENS, PATCH, POOL = 4, 2, 3  # of an image at most
VISION: dict[str, Any] = {
    "d_model": 24, "num_layers": 3, "num_heads": 3, "ffw_hidden": 20, "patch_size": PATCH, "output_length": TOKENS, "pos_emb_shape_yx": (13, 2),
    "pooling_kernel_size": POOL,
}  # fmt: skip
AUDIO: dict[str, Any] = {"num_layers": 2, "model_dims": 24, "lm_model_dims": 20, "atten_num_heads": 3}
SAMPLES, SHORT = 20_000, 13_300  # two clips: 31 tokens and 21
LARGE = {"vision": {**VISION, "standardize_embeddings": True}, "use_bidirectional_attention": "vision"}
CASES: dict[str, dict[str, Any]] = {
    "gemma4-31b": LARGE,
    "gemma4-26b-a4b": LARGE,
    "gemma4-e2b": {"vision": {**VISION, "use_clipped_linears": True}, "audio": AUDIO},
    "gemma4-e4b": {"vision": {**VISION, "use_clipped_linears": True}, "audio": AUDIO},
}
FULL, PADDED = ((12, 12), (6, 24)), ((12, 12), (6, 12))  # heights and widths in pixels


def encoders(given: dict[str, Any]) -> dict[str, Any]:
    """Return upstream's configuration of the towers."""
    from gemma.gm.nn.gemma4.audio import _modules as audio
    from gemma.gm.nn.gemma4.vision import _encoder as vision

    made = {k: x for k, x in given.items() if k not in ("vision", "audio")}
    made["vision_encoder"] = vision.VisionEncoder(**given["vision"])
    if "audio" in given:
        made["audio_encoder"] = audio.ConformerConfig(**given["audio"])
    return made


def patches(case: str, sizes: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return what upstream makes of images of these sizes: patches, positions, and the number of tokens."""
    from gemma.gm.nn.gemma4.vision import _encoder

    images = [jnp.asarray(np.abs(drawn(f"{case}/image{k}", (*size, 3))) % 1) for k, size in enumerate(sizes)]
    found, positions, real = _encoder.patchify_and_pad(images, PATCH, TOKENS * POOL**2)
    return np.asarray(found), np.asarray(positions), tuple(count // POOL**2 for count in real)


def features(waveform: jax.Array, lengths: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the mel features of clips, and which frames are valid."""
    from gemma.gm.nn.gemma4.audio import _model, _modules

    mel = _modules.GemaxMelFilterbank(sample_rate=16000, n_mels=128).apply({}, waveform)
    return np.asarray(mel), np.asarray(_model.AudioTokenizer.infer_mask(mel, lengths, waveform.shape[-1]))


def run(model: Any, given: dict[str, jax.Array], counts: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Compute embeddings of images and sounds, and logits of every position, which upstream's call leaves out at images."""
    from gemma.gm.nn.gemma4 import _transformer

    def images(kind: str) -> Any:
        flat = (given[f"{kind}_{part}"].reshape(1, -1, given[f"{kind}_{part}"].shape[-1]) for part in ("patches", "positions"))  # fmt: skip
        return _transformer.PreprocessedVisionInput(*flat, counts[kind])

    sound = {}
    if "waveform" in given:
        sound = {"audio": given["waveform"][None], "audio_lengths": given["lengths"][None]}
    inputs = model._encode_and_get_inputs(
        tokens=given["tokens"], images=images("full"), **sound, audio_soft_token_counts=counts.get("audio")
    )
    x, _ = model._apply_attention(inputs, None)
    cap = model.config.final_logit_softcap
    found = {
        "image_tokens": model._encode_vision(images("full"))[0],
        "padded_tokens": model._encode_vision(images("padded"))[0],
        "logits": jnp.tanh(model.embedder.decode(x) / cap) * cap,
    }
    if sound:
        found["audio_tokens"] = model._encode_audio(*sound.values(), counts["audio"])[0]
    return found


def text(counts: dict[str, tuple[int, ...]], rng: np.random.Generator) -> np.ndarray:
    """Return one text with two images and, after them, the sounds."""
    words = lambda n: rng.integers(5, SIZES["num_embed"], n).tolist()  # noqa: E731
    found = words(3)
    for count in counts["full"]:
        found += [IMAGE] * count + words(2)
    for count in counts.get("audio", ()):
        found += [SOUND] * count + words(2)
    return np.array([found], np.int32)


def main() -> None:
    """Replaces the golden cases."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    _stand_in_for_kauldron()
    names = ("gemma", "flax", "jax", "numpy")
    print(f"Python {sys.version.split()[0]}, {', '.join(f'{name} {version(name)}' for name in names)}")
    for case in sys.argv[1:] or CASES:
        towers = CASES[case]
        sizes = {**SIZES, **TEXT[case]}
        model = transformer(case, {**sizes, **encoders(towers)})
        inputs: dict[str, np.ndarray] = {}
        counts: dict[str, tuple[int, ...]] = {}
        for kind, of in (("full", FULL), ("padded", PADDED)):
            inputs[f"{kind}_patches"], inputs[f"{kind}_positions"], counts[kind] = patches(case, of)
        hidden: dict[str, Any] = {}
        if "audio" in towers:
            waveform, lengths = np.tile(drawn("waveform", (SAMPLES,)) / 4, (2, 1)), np.array([SAMPLES, SHORT])
            hidden = {"waveform": jnp.asarray(waveform), "lengths": jnp.asarray(lengths)}
            inputs["features"], inputs["valid"] = features(**hidden)
            counts["audio"] = tuple(int(valid[::2][::2].sum()) for valid in inputs["valid"])
        inputs["tokens"] = text(counts, np.random.default_rng(43))

        shown = {name: jnp.asarray(x) for name, x in inputs.items()}
        tree = jax.eval_shape(lambda model=model, shown=shown, hidden=hidden, counts=counts: model.init(jax.random.key(0), shown | hidden, counts, method=run))["params"]  # fmt: skip
        keys = {"/".join(path): path for path in flatten_dict(tree)}  # `conformer/stacked_layers_0` is one key
        leaves = {name: drawn(f"{case}/{name}", leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()}

        def outputs(
            leaves: Any, given: Any, model: Any = model, counts: Any = counts, hidden: Any = hidden, keys: Any = keys
        ) -> dict[str, jax.Array]:
            def mel_is_given(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
                return given["features"] if type(context.module).__name__ == "GemaxMelFilterbank" else call(*args, **kwargs)  # fmt: skip

            with nn.intercept_methods(mel_is_given):
                variables = {"params": unflatten_dict({keys[name]: leaf for name, leaf in leaves.items()})}
                found: dict[str, jax.Array] = model.apply(variables, given | hidden, counts, method=run)
            return found

        with float64():
            exact = {name: np.asarray(x) for name, x in lift(outputs)(leaves, shown).items()}
        rounded = {name: np.asarray(x) for name, x in outputs(leaves, shown).items()}
        DrawnCases(HERE).save(
            case, {**sizes, **towers, "layers": 4, "pattern": "LG", "counts": counts}, leaves, inputs, rounded, exact
        )
        for name, x in exact.items():
            print(f"{case} {name}: {x.shape}, {np.abs(x).mean():.2f} on average, drift {np.abs(x - rounded[name]).max() / np.abs(x).max():.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
