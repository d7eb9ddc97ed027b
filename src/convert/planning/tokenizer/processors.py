"""The classes that turn images and sound into a model's inputs: the output of a conversion is used through them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from convert.planning.tokenizer.files import TokenizerFiles

# `model_type` in config.json -> the class, as AutoProcessor, AutoImageProcessor and AutoFeatureExtractor of transformers 5.23 choose it.
PROCESSORS = {
    "beit": "BeitImageProcessor",
    "clip": "CLIPProcessor",
    "clip_vision_model": "CLIPImageProcessor",
    "dinov2": "BitImageProcessor",
    "gemma3": "Gemma3Processor",
    "gemma4": "Gemma4Processor",
    "owlv2": "Owlv2Processor",
    "owlvit": "OwlViTProcessor",
    "paligemma": "PaliGemmaProcessor",
    "pi0": "PI0Processor",
    "pix2struct": "Pix2StructProcessor",
    "qwen3_5_moe": "Qwen3VLProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "regnet": "ConvNextImageProcessor",
    "resnet": "ConvNextImageProcessor",
    "siglip": "SiglipProcessor",
    "siglip2": "Siglip2Processor",
    "tipsv2_vision_model": "Tipsv2ImageProcessor",
    "videoprism": "VideoPrismProcessor",
    "videoprism_vision_model": "LlavaOnevisionVideoProcessor",
    "vision-text-dual-encoder": "VisionTextDualEncoderProcessor",
    "vit": "ViTImageProcessor",
    "vivit": "VivitImageProcessor",
    "wav2vec2": "Wav2Vec2Processor",
    "whisper": "WhisperProcessor",
}

_ALONE = re.compile(
    r"(Image|Video)Processor$|^Wav2Vec2Processor$"
)  # wav2vec2's tokenizer writes, and only where it has CTC's head
_NO_TEXT = re.compile(r"For(Image|Audio|Video)Classification$")
LEROBOT = ("pi0", "pi05", "pi0_fast")  # `type` in config.json of lerobot's policies


def reads_text(config: Mapping[str, Any]) -> bool:
    """Whether the class that a ``config.json`` names needs a tokenizer."""
    model, classes = config.get("model_type"), config.get("architectures")
    of_sight_or_sound = any(_NO_TEXT.search(str(name)) for name in (classes if isinstance(classes, list) else []))
    return model is not None and not of_sight_or_sound and not _ALONE.search(PROCESSORS.get(str(model), ""))


def missing_processor(config: Mapping[str, Any], given: TokenizerFiles | None) -> str | None:
    """Return a note that names the processor of a class, where its files are not copied; None where nothing is missing."""
    if config.get("type") in LEROBOT:
        return (
            "inputs are made by lerobot's policy_preprocessor.json, with the statistics of the data, which is not in this "
            "directory: make it with lerobot's `make_pre_post_processors`"
        )
    encoder = config.get("encoder")  # of an encoder-decoder, which has no processor of its own
    parts = (config, encoder if isinstance(encoder, Mapping) else {})
    name = next((PROCESSORS[of] for part in parts if (of := str(part.get("model_type"))) in PROCESSORS), None)
    if name is None or (given is not None and given.has_processor):
        return None
    if any(str(of).endswith("ForImageClassification") for of in config.get("architectures") or ()):  # without texts
        name = name if _ALONE.search(name) else f"{name.removesuffix('Processor')}ImageProcessor"
    missing = (
        "--tokenizer has no processor_config.json or preprocessor_config.json"
        if given
        else "give their directory with --tokenizer"
    )
    return f"inputs are made by transformers' {name}, whose files are not in this directory: {missing}"
