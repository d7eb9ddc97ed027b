"""BERT, GPT-2, T5, Whisper, Llama, Mistral, Gemma and DINOv2 of transformers' flax classes, which transformers 5 no longer has.

A module per model has the factory; `equations/` has the models in plain JAX; `*_variants` have known mistakes;
`transformers_module` builds and runs the PyTorch side.
May import the modules next to the folders of `references`, `convert.planning` and what lies below it.
"""
