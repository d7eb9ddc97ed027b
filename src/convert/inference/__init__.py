"""Which parameter of a JAX function becomes which of a PyTorch module, derived from the two programs alone.

`infer` runs both with random weights, and `search` replays the target: where a parameter is needed, `products`, `convolutions`,
`elementwise` and `others` (in `proposals`) propose those of the source that meet the same data, and what follows refutes them. `alternatives` shows
which of the others give the same outputs, `proof` loads fresh weights into the module, and where the
programs differ `differences` names the operation. `derivation` has the result: for each
tensor its parts, the evidence of each, and a grade. No name is compared.
May import `references`, `layers`, `programs`, `numerics` and `core`.
"""
