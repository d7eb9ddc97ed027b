"""Run the two models of a reference.

run_jax.py and run_torch.py compute the values; evidence.py holds those of the JAX side, live or recorded; sampling.py chooses the
part of a value that a recording keeps; replay.py runs a part of the PyTorch model again; float64_plan.py removes the rounding
from a plan. `jax_modules` records the modules of a JAX
model, `conditions` the comparisons that its inputs never decide, and `built_module` compares a built module with its weights. May
import everything below `verify`.
"""
