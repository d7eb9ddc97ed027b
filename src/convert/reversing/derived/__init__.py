"""The tree that a model's rules give for PyTorch tensors, where no checkpoint has it.

`layouts` writes the rules for one published form of the tree. `leaves` finds from the names of the tensors which leaves there are,
`shapes` solves for their shapes, and `choose` plans with each model of a family and takes the one that fits. Nothing is read but
names, shapes and ``config.json``.
"""
