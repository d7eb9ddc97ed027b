"""Layers of the real libraries, small and random: what each saves, what it computes, and the PyTorch module that computes it."""
