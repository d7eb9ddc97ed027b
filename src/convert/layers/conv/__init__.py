"""Convolutions and transposed convolutions: dimension numbers, padding, standardization, probes, mistakes and drafts."""
