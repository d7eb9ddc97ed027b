"""RecurrentGemma: upstream's flax model, against upstream's PyTorch model or transformers'."""
