"""OWL-ViT, OWLv2 and ViViT of scenic."""

from __future__ import annotations

from convert.references.published.entry import Published

_SCENIC = "google-research/scenic@4a38d47 projects"

_OWL = (
    Published({"epsilon": 1e-5, "hidden_act": "quick_gelu"}, f"{_SCENIC}/owl_vit/clip/layers.py"),
    Published(
        {"head_activation": "gelu", "merged_epsilon": 1e-5},
        "transformers OwlViTBoxPredictionHead, OwlViTForObjectDetection; scenic has others",
    ),
    Published(
        {"pad_token_id": 0, "bos_token_id": 49406, "eos_token_id": 49407},
        f"{_SCENIC}/owl_vit/clip/tokenizer.py; transformers OwlViTTextConfig",
    ),
)


def _images(*sizes: tuple[int, int]) -> tuple[Published, ...]:
    """Return the entries for patches of these sides, and the images that they are cut from."""
    return tuple(
        Published(
            {"image_size": image},
            f"input_size in {_SCENIC}/owl_vit/configs",
            {"P": side, "L": (image // side) ** 2 + 1},
            binding=False,
        )
        for side, image in sizes
    )


_VIVIT = (
    Published(
        {"epsilon": 1e-6, "hidden_act": "gelu_pytorch_tanh"}, f"{_SCENIC}/vivit/model.py; flax.linen.LayerNorm, gelu"
    ),
    Published(
        {"image_size": 224, "num_frames": 32},
        f"{_SCENIC}/vivit/configs/kinetics400/vivit_base_k400.py",
        {"T": 2, "P": 16, "L": 3137},
        binding=False,
    ),
)

MODELS: dict[str, tuple[Published, ...]] = {
    "owlvit": (*_OWL, *_images((32, 768), (16, 768), (14, 840), (14, 672))),
    "owlv2": (*_OWL, *_images((16, 960), (14, 1008))),
    "vivit": _VIVIT,
}
