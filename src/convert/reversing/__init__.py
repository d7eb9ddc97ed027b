"""Runs a plan backwards: gives a checkpoint's leaves from the tensors of a PyTorch model.

`plan` decides, from specs alone, which part of which tensor each leaf is made of, and refuses what has no inverse. `source` is a
checkpoint whose leaves are computed back while they are read. ``derived`` finds the tree from the tensors alone, where no
checkpoint is given with --like. `tree` nests the leaves as JAX code has them, `write` writes them in one of the ``formats``. May import `writing`, `planning`, `checkpoints`, `layers`,
`numerics` and `core`.
"""
