"""What happened to the values of one tensor on the way from the checkpoint to the file.

`find` tries each corruption in turn: `element_changes` (single values), `value_changes` (all values), `rounding`, `row_orders`.
`permutations` says in words what an order of rows is; `relations` compares two tensors of one shape.
Imports nothing of the modules beside the folder.
"""
