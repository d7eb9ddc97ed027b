"""Embedding tables, and the buffers of sinusoidal position embeddings."""
