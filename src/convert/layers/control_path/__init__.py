"""Paths through data: what diffrax interpolates, for torchcde."""
