"""Sizes in the config.json of a flax checkpoint: one that the tree contradicts is refused, also the default that a missing one then has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support import config_numbers, flax_families
from support.marks import slow_but

FAMILY = "flax-transformers"
QUICK = ("bert.BertForSequenceClassification", "clip.CLIPModel", "resnet.ResNetModel")
# Keys of numbers of which another one, or none, is accepted -> why.
NO_SIZE = {
    r".*_token_id|mask_\w+|num_negatives|semantic_loss\w+|\w+_dropout_prob": "of tokens and of training",
    r"(min|max)_length|num_beams|num_beam_groups|\w*no_repeat_ngram_size|top_k|num_return_sequences": "of generation",
    r"chunk_size_feed_forward|pretraining_tp|relative_attention_max_distance|rotary_dim|local_radius|\w*block_size|num_random_blocks|window_size|(conv|adapter)_stride.*|encoder_stride|median_filter_width": "how the class computes: no leaf shows the number",
    r"(num_|encoder_|decoder_)?attention_heads|n_heads?|num_heads": "divides the width: no leaf shows the number",
    r"tdnn_.*|xvector_output_dim|out_indices.*|pool_scales.*|auxiliary_\w+|num_feat_extract_layers|decoder_vocab_size": "of what no flax class has",
}  # fmt: skip
# The same for cases without the part of the model that a number is of.
OTHER_PART = {
    r"wav2vec2\.(?!.*CTC).*|speech_encoder_decoder": "encoder.vocab_size|vocab_size|(encoder.)?classifier_proj_size",
    r"wav2vec2\.(?!.*PreTraining).*|speech_encoder_decoder": r"(encoder\.)?(codevector_dim|proj_codevector_dim|num_codevector\w*)",
    r"wav2vec2\.(?!adapter).*|speech_encoder_decoder": r"(encoder\.)?(adapter_kernel_size|num_adapter_layers|output_hidden_size)",
    r"wav2vec2.*CTC|whisper.*": "classifier_proj_size",
    r"whisper\.WhisperForAudioClassification": r"decoder_\w+|max_target_positions|vocab_size",
    r"bart\.causal|speech_encoder_decoder": r"(decoder\.)?(encoder_layers|encoder_ffn_dim|num_hidden_layers)",
    r".*EncoderModel|t5\.gated-encoder": "num_decoder_layers",
    r"(vit|wav2vec2|whisper)\.square": "max_position_embeddings",  # one set of sizes for all classes: some have no such key
    r"vit\.square": "vocab_size",
    r"clip\.square": r"vision_config\.(max_position_embeddings|vocab_size)",
    r"opt\.square": "intermediate_size",
    r"clip\.(CLIPModel|square)|vision_text.*": r"\w+_config\.projection_dim",
    r"clip\.(text|vision)": "projection_dim",
    r"beit\.(?!BeitForMasked).*": "vocab_size",
    r"beit\.(?!shared|positions).*": "image_size",
    r"distilbert\.sinusoidal|marian.*|pegasus.*|roformer.*|xglm.*": "max_position_embeddings",
    r"gptj.*": "n_positions",
    r"bart\.BartForQuestionAnswering": "id2label",  # the class has two outputs whatever it says
    r"albert.*": "num_hidden_layers",  # as often as the one group of layers runs
}
HAS_CLASSES = ("SequenceClassification", "TokenClassification", "ImageClassification", "AudioClassification", "ForQuestionAnswering")  # fmt: skip
DEFAULTS = {"type_vocab_size": 2, "num_channels": 3, "n_layer": 2, "num_hidden_groups": 1, "adapter_kernel_size": 3, "num_codevector_groups": 2}  # fmt: skip


def explained(case: str, key: str, removed: bool) -> bool:
    """Whether a number may be another one."""
    stated, last = flax_families.config(case), re.sub(r"(\.\d+)+$", "", key).rpartition(".")[2]
    (name,) = stated["architectures"]
    if any(re.fullmatch(one, last) for one in NO_SIZE) or any(re.fullmatch(of, case) and re.fullmatch(one, key) for of, one in OTHER_PART.items()):  # fmt: skip
        return True
    if last == "id2label":
        as_default = removed and case.startswith("bart.") and len(stated[last]) == 3  # of BartConfig
        return not name.endswith(HAS_CLASSES) or key != last or as_default
    if last == "image_size" and not removed:
        return True  # as many patches
    if last == "embedding_size" and removed:
        return bool(stated[last] == stated["hidden_size"])
    if last == "encoder_layers":
        return "num_hidden_layers" in stated  # another name of it, which wins
    if last == "num_hidden_layers" and removed:
        return stated.get("encoder_layers") == stated[last]
    if last == "num_decoder_layers" and removed:
        return stated.get("num_layers") == stated[last]  # what it is where it is not said
    return removed and last in DEFAULTS


@pytest.mark.parametrize("case", slow_but(QUICK, flax_families.GENERIC))
def test_each_size_is_compared_with_the_tree(case: str, tmp_path: Path) -> None:
    found = config_numbers.accepted(FAMILY, flax_families.config(case), flax_families.specs(case, tmp_path))
    assert [(key, removed) for key, removed in found if not explained(case, key, removed)] == []
