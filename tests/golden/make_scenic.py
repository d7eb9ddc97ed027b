"""Writes the golden cases of OWL-ViT, OWLv2, ViViT and ViT: the flax code of scenic, on a CPU.

scenic is no package on PyPI. It runs from copies of its repository and of big_vision's, in the environment of the tests:

    pip install --no-deps --target /some/folder ml_collections immutabledict
    git clone https://github.com/google-research/scenic && git -C scenic checkout 4a38d47
    git clone https://github.com/google-research/big_vision && git -C big_vision checkout 0127fb6
    PYTHONPATH=scenic:big_vision:/some/folder:src:tests python tests/golden/make_scenic.py [CASE ...]

scenic/CASE.npz: the configuration, names and shapes of the parameters, inputs, and what upstream's `TextZeroShotDetectionModule`, `ViViT` and
`ViT` computed, in float32 with matmul precision `highest` and in float64 with casts removed. The weights are those of `drawn` in
tests/support/drawn_cases.py, those of OWL-ViT smaller (`scaled` in tests/support/owl_vit.py). Modules for training, data and downloads, which need TensorFlow, are not used when the models run: `Absent`
stands for them. A head of OWL-ViT's vision tower is 64 wide in upstream's code.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from convert.numerics.lift_jax import float64, lift
from support import owl_vit
from support.drawn_cases import DrawnCases, drawn

Values = dict[str, np.ndarray[Any, Any]]
Scaled = Callable[[Values], Values]

HERE = Path(__file__).parent / "scenic"
ABSENT = (
    *("tensorflow", "tensorflow.io", "clip", "clu", "big_vision.utils"),
    *("scenic.train_lib", "scenic.model_lib.base_models", "scenic.common_lib", "scenic.projects.baselines.clip.download"),
    *(f"scenic.model_lib.base_models.{name}_model" for name in ("classification", "multilabel_classification")),
    "scenic.projects.owl_vit.matching_base_models",
)  # fmt: skip
ROWS, GRID, PATCH, LENGTH = 43, 5, 4, 7  # rows of the table, patches along a side, side of a patch, tokens of a text
CLIP = {
    "embed_dim": 20, "vocab_size": ROWS, "vision_num_layers": 2, "vision_features": 128, "vision_patch_size": PATCH,
    "text_features": 20, "text_num_heads": 5, "text_num_layers": 3,
}  # fmt: skip
OUTPUTS = ("pred_logits", "pred_boxes", "class_embeddings", "query_embeddings", "objectness_logits")
VIVIT = {"hidden_size": 15, "mlp_dim": 22, "num_layers": 3, "num_heads": 3, "num_classes": 7}
VIT = {"hidden_size": 24, "mlp_dim": 48, "num_layers": 3, "num_heads": 2, "num_classes": 7}
VITS: dict[str, dict[str, Any]] = {
    "vit-token": {"classifier": "token"},
    "vit-token-rep": {"classifier": "token", "representation_size": 13},
    "vit-gap": {"classifier": "gap"},
    "vit-gmp": {"classifier": "gmp"},
    "vit-map": {"classifier": "map"},
    "vit-token-2d": {"classifier": "token", "positional_embedding": "sinusoidal_2d"},
    "vit-token-1d": {"classifier": "token", "positional_embedding": "sinusoidal_1d"},
    "vit-gap-1d": {"classifier": "gap", "positional_embedding": "sinusoidal_1d"},
    "vit-gap-none": {"classifier": "gap", "positional_embedding": "none"},
}
CLIP_OF = {"patches": (4, 4, 2), "frames": 6, "image": 12}  # of the videos


class _Named(type):
    """The type of a class that has each name."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Nothing(metaclass=_Named):
    """Each name in it is `Nothing`."""


class Absent(types.ModuleType):
    """A module that the network does not need: each of its names is `Nothing`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(Nothing, name)


def queries(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Texts of different lengths, which end with the last token of the table and are padded; the last of all is only padding."""
    tokens = rng.integers(1, ROWS - 1, (2, 3, LENGTH)).astype(np.int32)
    for k, end in enumerate((6, 3, 5, 2, 4, -1)):
        text = tokens[k // 3, k % 3]
        text[end + 1 :] = 0
        if end > 0:
            text[end] = ROWS - 1
    return tokens


def record(
    case: str, config: dict[str, Any], model: Any, inputs: Values, outputs: Callable[[Any], Any], scaled: Scaled
) -> None:
    """Replace a golden case."""
    tree = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs.values(), train=False))["params"]
    leaves = scaled({name: drawn(f"{case}/{name}", x.shape) for name, x in flatten_dict(tree, sep="/").items()})

    def run(leaves: Any, inputs: Any) -> Any:
        return outputs(model.apply({"params": unflatten_dict(leaves, sep="/")}, *inputs.values(), train=False))

    with float64():
        exact = jax.tree.map(np.asarray, lift(run)(leaves, inputs))
    rounded = jax.tree.map(np.asarray, jax.jit(run)(leaves, inputs))
    DrawnCases(HERE).save(case, config, leaves, inputs, rounded, exact)
    print(f"{case}: {len(leaves)} leaves")
    for name, x in exact.items():
        shown = np.where(x == -1e6, 0, x)
        print(f"  {name} {x.shape}: {np.abs(shown).max():.2f} at most, drift {np.abs(x - rounded[name]).max():.1e}")


def owl(case: str, objectness: bool) -> None:
    """Image and texts, as configs/clip_b32.py and configs/owl_v2_clip_b16.py put the model together."""
    from ml_collections import ConfigDict
    from scenic.projects.owl_vit import models
    from scenic.projects.owl_vit.clip import model as clip

    clip.CONFIGS["small"] = dict(CLIP)
    body = ConfigDict({"type": "clip", "variant": "small", "merge_class_token": "mul-ln"})
    head = ConfigDict({"stop_gradient": True}) if objectness else None
    model = models.TextZeroShotDetectionModule(body_configs=body, objectness_head_configs=head, normalize=True, box_bias="both")  # fmt: skip
    rng = np.random.default_rng(47)
    tokens, images = queries(rng), rng.uniform(0, 1, (2, GRID * PATCH, GRID * PATCH, 3)).astype(np.float32)
    inputs = {"images": images, "tokens": tokens}
    record(case, {**CLIP, "grid": GRID}, model, inputs, lambda found: {name: found[name] for name in OUTPUTS if name in found}, owl_vit.scaled)  # fmt: skip


def vivit() -> None:
    """Videos, as configs/kinetics400/vivit_base_k400.py puts the model together."""
    from ml_collections import ConfigDict
    from scenic.projects.vivit import model as upstream

    model = upstream.ViViT(
        **VIVIT, patches=ConfigDict({"size": CLIP_OF["patches"]}), classifier="token",
        temporal_encoding_config=ConfigDict({"method": "3d_conv"}), attention_config=ConfigDict({"type": "spacetime"}),
    )  # fmt: skip
    shape = (2, CLIP_OF["frames"], CLIP_OF["image"], CLIP_OF["image"], 3)
    videos = np.random.default_rng(53).uniform(-1, 1, shape).astype(np.float32)
    record(
        "vivit",
        {**VIVIT, **CLIP_OF},
        model,
        {"videos": videos},
        lambda logits: {"logits": logits},
        lambda leaves: leaves,
    )


def vit(case: str) -> None:
    """Images, as projects/baselines/configs/imagenet/imagenet_vit_config.py puts the model together, for each classifier."""
    from ml_collections import ConfigDict
    from scenic.projects.baselines import vit as upstream

    model = upstream.ViT(**VIT, **VITS[case], patches=ConfigDict({"size": (4, 4)}))
    shape = (1, 12, 12, 3) if "positional_embedding" in VITS[case] else (2, 20, 20, 3)
    images = np.random.default_rng(67).uniform(-1, 1, shape).astype(np.float32)
    record(case, {**VIT, **VITS[case]}, model, {"images": images}, lambda logits: {"logits": logits}, lambda leaves: leaves)  # fmt: skip


def main() -> None:
    """Replace the golden cases, or some of them."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    importlib.import_module("flax.io")  # looks for the real TensorFlow
    sys.modules |= {name: Absent(name) for name in ABSENT}
    for name in ABSENT:
        sys.modules[name].__path__ = []  # a package
    for case in sys.argv[1:] or ("owlvit", "owlv2", "vivit", *VITS):
        if case in VITS:
            vit(case)
        elif case == "vivit":
            vivit()
        else:
            owl(case, objectness=case == "owlv2")


if __name__ == "__main__":
    main()
