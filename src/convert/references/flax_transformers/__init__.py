"""flax_transformers."""
