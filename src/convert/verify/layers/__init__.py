"""The layers level of a check: for each rule, the declared JAX operation against torch's layer.

`level` decides which layers are run, `representatives` which of them stand for others, `samples` collects what a probe needs,
and `measure` compares both sides. What a layer computes is in its kind (`LayerKind.probe` in convert.layers). `placement` compares
names alone; `as_torch` reads a file of another target format as the tensors of torch's layers. May import everything below
`verify`, and of `verify` `report`.
"""
