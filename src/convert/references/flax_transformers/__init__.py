"""BERT, GPT-2, T5, Whisper, Llama, Mistral, Gemma and DINOv2 of transformers' flax classes, which transformers 5 no longer has.

A module per model has the factory; its ``_jax`` module has the model's equations in plain JAX. jax_layers.py and
transformers_module.py have what they share.
May import the modules next to the folders of `references`, `convert.planning` and what lies below it.
"""
