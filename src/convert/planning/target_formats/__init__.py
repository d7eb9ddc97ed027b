"""Output formats: torch (identity) and Burn.

A plan is made for torch's layers; a `TargetFormat` (`base`) translates its tensors, and torch is the identity. `registry` lists the
formats. `burn` is the layout of Burn's modules. Imports `convert.layers`, `convert.rules` and `planning.compile`.
"""
