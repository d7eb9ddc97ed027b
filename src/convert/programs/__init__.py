"""What two programs compute, operation by operation: the JAX model and the PyTorch model, each as the record of one run.

`program` has the types: a program is a list of operations, and the values between them. `record_jax` and `record_torch` record a
run in float64, with the casts removed; `run_checks` has what a run must hold, `where` finds the line of the model's code, and
`jax_modules` the module that runs. `fingerprint` finds a value of one program in the other, in any order of its axes.
May import `numerics` and `core`.
"""
