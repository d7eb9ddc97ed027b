"""Leaves that are found by the outputs alone: each is shown by itself, while all the others hold one number."""
