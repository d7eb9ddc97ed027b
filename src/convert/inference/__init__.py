"""Which parameter of a JAX function becomes which of a PyTorch module, derived from the two programs alone.

`derivation` has the result: for each tensor of the target its parts, the evidence of each, and a grade. No name takes part.
May import `references.protocol`, `layers`, `programs`, `numerics` and `core`.
"""
