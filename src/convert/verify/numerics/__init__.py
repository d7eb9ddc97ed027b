"""Numbers: distances of arrays and their tolerances, runs in float64 with casts removed, full-precision products.

`compare` measures and derives the tolerances; `lift_jax` and `lift_torch` remove casts; `precision` fixes the frameworks;
`special_values` and `bits` look at single values. May import `core` only.
"""
