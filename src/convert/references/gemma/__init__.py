"""gemma."""
