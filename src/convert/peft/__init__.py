"""LoRA pairs as PEFT's ``adapter_model.safetensors`` and ``adapter_config.json``, unmerged, and back. `factors` makes ``lora_A`` and
``lora_B`` of one pair in the layout of the target's weight, with `gathered`, whose inverse leads back. `plan` says what the adapter
consists of, `write` writes it. `adapter` opens PEFT's files, with the modules that they name (`selection`), `grafted` is a checkpoint
with the leaves of their pairs, `blocks` rearranges pairs that share a leaf, and `back` plans the way back. May import
`convert.reversing`, `convert.writing` and everything below.
"""
