"""The model level: compare both models at every boundary and output (level.py), or all backends with each other (backends.py).

Data flow: sides -> level -> diagnosis -> messages; backend_runs -> backends. Tolerances are derived in
`convert.numerics.tolerances`. May import `verify.sides`, `verify.diagnosis`,
`verify.report` and what lies below them.
"""
