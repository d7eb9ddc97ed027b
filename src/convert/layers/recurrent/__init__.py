"""Recurrent layers: `equations` of a cell < `library_cells` by name < `kinds`; how they compile, their probes and mistakes.

May import `convert.core`, and of `convert.layers` the modules next to the folders.
"""
