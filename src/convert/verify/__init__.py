"""The proof that both models compute the same, in four levels."""
