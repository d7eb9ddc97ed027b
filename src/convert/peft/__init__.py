"""LoRA pairs as PEFT's ``adapter_model.safetensors`` and ``adapter_config.json``, unmerged: `factors` makes ``lora_A`` and ``lora_B``
of one pair in the layout of the target's weight, `plan` says what the adapter consists of, `write` writes it. May import
`convert.writing` and everything below.
"""
