"""Embedding tables, and the buffers of sinusoidal position embeddings.

May import `convert.core`, and of `convert.layers` the modules next to the folders, `parameter` and `transforms`.
"""
