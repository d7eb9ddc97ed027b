"""The proof that the converted model computes what the JAX model computes, in four levels, cheapest first.

1. `coverage`: the file holds the tensors of the plan, and the target loads it. 2. `weights`: every tensor equals, bit for bit,
what the plan makes of the checkpoint. 3. `layers`: one layer of each group, run by JAX and by PyTorch, and the hyperparameters
that no weight holds (`config`). 4. `model`: both models on the same inputs, in float64 and in native precision.

The first three levels trust the rules; the fourth tests them. `run` opens both sides and runs the levels; `mistakes` and
`diagnosis` name the bug behind a difference; `sides` runs the models, `recording` replaces the JAX model; `report` holds the
outcome; `stopped` keeps it where an error of this package ends the search for a bug. May import `api` and everything below it, and
`references`; only `cli` imports it.
"""
