"""Norms: layer, RMS, group, batch and instance norm, with their probes, mistakes and drafts."""
