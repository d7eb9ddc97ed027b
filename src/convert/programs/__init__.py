"""Record one run of a JAX model or of a PyTorch module as a *program*: its operations, and the values between them.

`program` has the types. `record_jax` and `record_torch` (with the modules `torch_*`) record a run in float64, with the casts removed;
`run_checks` refuses runs that cannot be compared, `where` finds the line of the model's code, and `jax_modules` the module that runs.
`complex_numbers` writes complex values as two real ones each. `jax_elements` and `torch_elements` say of which elements of the parameters a value is computed. `rerun` computes a record again with
other parameters. `fingerprint` finds a value of one program in the other, in any order of its axes. `divergence` compares two programs, and
`rewrites` calls parts of the target's record otherwise.
May import `numerics` and `core`.
"""
