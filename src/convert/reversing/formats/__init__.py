"""Writes a checkpoint in a format of JAX code: a module for each, and ``ocdbt``, the key-value store of Orbax.

Each writes a `Source` leaf by leaf, in pieces, with the same bytes for the same leaves. May import `checkpoints` and `core`.
"""
