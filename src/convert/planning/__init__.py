"""Make a `Plan` of a checkpoint's leaf specs and a rule file: every output tensor, and the operations that make it. Reads no arrays.

`select_rules` scores and picks the rule file of a family. `planner` runs the stages, each of which returns a value and its
findings: match (`modules/` and `match`, `match_errors`), size (`constraints`, `sizes`, `sidecar`, `architectures`, `facts`), compile
(`adapters/`, `merge_leaves`, `compile/`, `outputs`) and plan (`target_formats/`, `plan`, `ambiguity`). `options` and `settings` are what the user chose;
`low_rank_source` is the view of the checkpoint with merged leaves. May import `convert.rules`, `convert.layers`,
`convert.checkpoints` and `convert.core`.
"""
