"""The classes that turn images and sound into a model's inputs: the output of a conversion is used through them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.planning.tokenizer.files import TokenizerFiles

# `model_type` in config.json -> the class, as AutoProcessor, AutoImageProcessor and AutoFeatureExtractor of transformers 5.23 choose it.
PROCESSORS = {
    "beit": "BeitImageProcessor",
    "blip": "BlipProcessor",
    "clip": "CLIPProcessor",
    "dinov2": "BitImageProcessor",
    "gemma3": "Gemma3Processor",
    "gemma4": "Gemma4Processor",
    "owlv2": "Owlv2Processor",
    "owlvit": "OwlViTProcessor",
    "paligemma": "PaliGemmaProcessor",
    "pi0": "PI0Processor",
    "regnet": "ConvNextImageProcessor",
    "resnet": "ConvNextImageProcessor",
    "siglip": "SiglipProcessor",
    "videoprism": "VideoPrismProcessor",
    "videoprism_vision_model": "LlavaOnevisionVideoProcessor",
    "vision-text-dual-encoder": "VisionTextDualEncoderProcessor",
    "vit": "ViTImageProcessor",
    "vivit": "VivitImageProcessor",
    "wav2vec2": "Wav2Vec2Processor",
    "whisper": "WhisperProcessor",
}


def missing_processor(config: Mapping[str, Any], given: TokenizerFiles | None) -> str | None:
    """Return a note that names the processor of a class, where its files are not copied; None where nothing is missing."""
    name = PROCESSORS.get(str(config.get("model_type")))
    if name is None or (given is not None and given.has_processor):
        return None
    missing = (
        "--tokenizer has no processor_config.json or preprocessor_config.json"
        if given
        else "give their directory with --tokenizer"
    )
    return f"inputs are made by transformers' {name}, whose files are not in this directory: {missing}"
