"""What a rule says of a weight besides its kind: a factor, RoPE pairs, a flattened map, a weight norm or spectral norm.

`weight_transforms` and `weight_normalization` derive the operations from the rule; `probe` and `mistakes` are what the kinds'
probes and mistakes share. The types and their keys are in `convert.layers.annotations`. Imports `convert.layers.base` and below.
"""
