"""Compare arrays and derive tolerances; run both frameworks in float64 with casts removed, or with full-precision products.

`compare` measures differences; `tolerances` derives how large they may be; `lift_jax` and `lift_torch` remove casts, `lifter` evaluates the primitives of JAX without them;
`jax_observer` is what a lifted run reports to, `jax_values` has its dtypes, `loops` repeats what the first iterations of a loop did, and
`numpy_primitives` evaluates JAX's common primitives;
`precision` sets the device and the precision of both frameworks; `special_values` and `bits` look at single values, and `roots` writes
a number as a formula such as 1/sqrt(64). May import `convert.core`.
"""
