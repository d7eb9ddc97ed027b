"""Numbers: differences of arrays and their tolerances, runs in float64 with casts removed, full-precision products.

`compare` measures differences; `tolerances` derives how large they may be; `lift_jax` and `lift_torch` remove casts;
`jax_observer` has what a lifted run tells, and `numpy_primitives` evaluates JAX's common primitives;
`precision` fixes the frameworks; `special_values` and `bits` look at single values. May import `convert.core`.
"""
