"""Norms: layer, RMS, group, batch and instance norm, with their probes, mistakes and drafts.

May import `convert.core`, and of `convert.layers` the modules next to the folders and `transforms`.
"""
