"""recurrentgemma."""
