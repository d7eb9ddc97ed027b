"""Burn (Rust) as a target format: `format` is the entry.

`modules` maps layers to Burn's modules and refuses those without one, `config` names their constructors, `tensors` translates
torch's tensors to Burn's. May import `convert.rules`, `convert.layers`, `convert.core`, `planning.compile` and
`planning.target_formats.base`.
"""
