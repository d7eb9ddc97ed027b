"""Run the two models of a reference.

run_jax.py and run_torch.py compute the values; evidence.py holds those of the JAX side, live or recorded; sampling.py chooses the
part of a value that a recording keeps; replay.py runs a part of the PyTorch model again; float64_plan.py removes the rounding
from a plan. May import `verify.numerics`, `verify.written` and everything below `verify`.
"""
