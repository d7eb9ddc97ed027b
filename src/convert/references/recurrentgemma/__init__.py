"""RecurrentGemma: upstream's flax model, against upstream's PyTorch model or transformers'.

May import the modules next to the folders of `references`, `convert.planning` and what lies below it.
"""
