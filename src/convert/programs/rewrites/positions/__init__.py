"""Positions: how RoPE turns queries and keys, where norms stand beside it, and which rows of a table are taken."""
