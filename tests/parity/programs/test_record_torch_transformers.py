"""Models of transformers are recorded as they run: their outputs, without kernels, and every parameter that is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from support.recorded_module import recorded

transformers = pytest.importorskip("transformers")
RNG = np.random.default_rng(0)
TOKENS = {"input_ids": RNG.integers(3, 50, (2, 7)), "attention_mask": np.array([[1] * 7, [1] * 5 + [0] * 2])}
SIZES = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gemma2() -> Any:
    return transformers.AutoModelForCausalLM.from_config(transformers.Gemma2Config(**GEMMA, **SPECIAL))


def gemma3() -> Any:
    return transformers.AutoModelForCausalLM.from_config(transformers.Gemma3TextConfig(**GEMMA, **SPECIAL))


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3, **SPECIAL)
    return transformers.MixtralForCausalLM(config)


def recurrent_gemma() -> Any:
    sizes = SIZES | {"num_hidden_layers": 3, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 4}
    config = transformers.RecurrentGemmaConfig(**sizes, lru_width=16, attention_window_size=4, **SPECIAL)
    return transformers.RecurrentGemmaForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=16, **SPECIAL)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, max_position_embeddings=16))


def t5() -> Any:
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def whisper() -> Any:
    sides = {
        f"{side}_{name}": n
        for side in ("encoder", "decoder")
        for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))
    }
    config = transformers.WhisperConfig(
        vocab_size=50,
        d_model=16,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=16,
        decoder_start_token_id=1,
        **sides,
        **SPECIAL,
    )
    return transformers.WhisperForConditionalGeneration(config)


DECODER = {"decoder_input_ids": TOKENS["input_ids"]}
SOUND = {"input_features": RNG.normal(size=(2, 8, 20))}
MODELS = {
    "gemma2": (gemma2, TOKENS, {"lm_head.weight": "model.embed_tokens.weight"}),
    "gemma3 without a mask": (
        gemma3,
        {"input_ids": TOKENS["input_ids"]},
        {"lm_head.weight": "model.embed_tokens.weight"},
    ),
    "mixtral": (mixtral, TOKENS, {}),
    "recurrent gemma": (recurrent_gemma, TOKENS, {}),
    "gpt2": (gpt2, TOKENS, {"lm_head.weight": "transformer.wte.weight"}),
    "bert": (bert, TOKENS, {}),
    "t5": (t5, TOKENS | DECODER, {}),
    "whisper": (whisper, SOUND | DECODER, {}),
}


def logits(module: Any, inputs: Any) -> dict[str, Any]:
    return (
        {"logits": module(**inputs, use_cache=False).logits}
        if "Masked" not in type(module).__name__
        else {"logits": module(**inputs).logits}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("make", "inputs", "tied"), MODELS.values(), ids=MODELS)
def test_a_model_is_recorded(make: Callable[[], Any], inputs: dict[str, np.ndarray], tied: dict[str, str]) -> None:
    torch.manual_seed(0)
    program = recorded(make(), logits, **inputs)
    assert program.outputs["logits"].leaves == set(program.parameters)
    assert program.opaque == ()
    assert tied.items() <= program.tied.items()
    assert all(operation.where for operation in program.operations)
    assert not [
        o.name for o in program.operations if "scaled_dot" in o.name or "layer_norm" in o.name or o.name == "addmm"
    ]
    assert {operation.where.partition(":")[0] for operation in program.operations if operation.name == "mm"} <= {
        f"modeling_{name}.py"
        for name in ("gemma2", "gemma3", "mixtral", "recurrent_gemma", "gpt2", "bert", "t5", "whisper")
    } | {"pytorch_utils.py", "moe.py"}


def test_a_cache_that_is_written_to_is_read_later() -> None:
    """The second call sees the keys of the first through the cache."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **SPECIAL)

    def twice(module: Any, inputs: Any) -> dict[str, Any]:
        first = module(input_ids=inputs["tokens"][:, :5], use_cache=True)
        second = module(input_ids=inputs["tokens"][:, 5:], past_key_values=first.past_key_values, use_cache=True)
        return {
            "first": first.logits,
            "second": second.logits,
            "whole": module(input_ids=inputs["tokens"]).logits[:, 5:],
        }

    program = recorded(transformers.LlamaForCausalLM(config), twice, tokens=TOKENS["input_ids"])
    np.testing.assert_allclose(program.outputs["second"].array, program.outputs["whole"].array, rtol=1e-9)
