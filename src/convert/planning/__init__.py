"""Make a `Plan` of a checkpoint's leaf specs and a rule file: every output tensor, and the operations that make it. Reads no arrays.

`select_rules` scores and picks the rule file of a family; `distance` says which one is nearest where none fits. `planner` runs the
stages, each of which returns a value and its findings: match (`modules/`, `matching/`, `rule_match`), size (`constraints`, `sizes`,
`facts/`), compile (`adapters/`, `merge_leaves`, `compile/`, `compile_rules`, `outputs`, `layer_dtypes`) and plan (`target_formats/`,
`plan`, `ambiguity`, `tokenizer/`). `options` is what the user chose; `low_rank_source` is the view of the checkpoint
with merged leaves. May import `convert.rules`, `convert.layers`, `convert.checkpoints` and `convert.core`.
"""
