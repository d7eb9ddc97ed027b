"""Derives which parameter of a JAX function becomes which parameter of a PyTorch module, from the two programs alone.

`pair` finds the two programs that the user names (`shrink`: with smaller sizes), and `requirements` refuses what cannot be compared.
`models` records both with random weights (`draws`), and ``forms`` gives the records one form: sums, sums of products, lookups,
constants that parameters meet. ``meetings`` are the operations in which data meets parameters. `search` goes from one ``segment`` of
the target to the next. Where an operation needs a parameter, ``proposals`` propose the parameters of the source that meet the same
data (``candidates``), those of a recurrent cell all at once; the operations that follow refute wrong ones.
``grading`` finds alternatives that give the same outputs, and names the operation where the programs differ; `tested` proves the
result with fresh weights; `last_digits` and `small_differences` tell rounding from a difference. `derivation` holds the result: for each tensor its parts, their evidence and a grade. `facts` reads what no weight
holds, and ``rule_file`` writes the rules. `infer` is all of it. No names are compared.
May import `references`, `layers`, `programs`, `numerics` and `core`.
"""
