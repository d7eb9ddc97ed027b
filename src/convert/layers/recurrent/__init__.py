"""Recurrent layers: `equations` of a cell < `library_cells` by name < `kinds`; how they compile, their probes and mistakes."""
