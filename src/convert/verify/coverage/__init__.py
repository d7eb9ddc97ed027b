"""Level 1, coverage: the file holds the tensors of the plan, with their shapes and dtypes, and loads as the target expects.

`level` compares the names (`names` finds a changed prefix) and loads the target's module on the meta device; `hf_directory`
checks what transformers' ``from_pretrained`` would load from a directory. May import `weights.tied` and `report`,
and everything below `verify`.
"""
