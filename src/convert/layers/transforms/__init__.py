"""Optional keys of a rule that describe its weight: prescaled_by, rope, flattened, weight_norm, spectral_norm.

`rope`, `weight_transforms` (prescaled_by, flattened) and `weight_normalization` derive the operations from the rule. `probe` and
`mistakes` hold what the kinds' probes and mistakes share. The types and their keys are in `convert.layers.weight_keys`.
May import `convert.core`, and of `convert.layers` the modules next to the folders.
"""
