"""From a rule and its leaves to steps: the part of compiling that follows from what every kind declares.

`named_leaf` names the axes of a leaf, `axes` moves them into the target's order, `weight_norm` folds norms into the weight, `pieces`
joins several leaves to one tensor, and `compiler` makes the steps. `layer_tensor` repeats those of a layer for other layers. Kinds with a computation of their own override `LayerKind.compile`. May import `convert.layers`,
`convert.checkpoints` and `convert.core`, and of `planning` `constraints` and `low_rank_source`.
"""
