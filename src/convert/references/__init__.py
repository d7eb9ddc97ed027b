"""The two models of each family, built from their upstream packages, for the model-level check."""
