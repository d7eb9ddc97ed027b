"""Output formats: torch (identity) and Burn.

A plan is made for torch's layers; a `TargetFormat` (`base`) translates its tensors, and torch is the identity. `registry`
lists the formats. `burn` is the layout of Burn's modules. May import `convert.rules`, `convert.layers`, `convert.core` and
`planning.compile`.
"""
