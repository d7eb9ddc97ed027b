"""Derives which parameter of a JAX function becomes which parameter of a PyTorch module, from the two programs alone.

`pair` finds the two programs that the user names (`shrink`: with smaller sizes), and `requirements` refuses what cannot be compared.
`infer` runs both with random weights (`draws`). `search` goes from one ``segment`` of the target to the next, and ``segment`` walks
through it with what is known (`replay`). Where an operation needs a parameter (``meetings``), ``proposals`` propose the parameters of
the `source` that meet the same data, those of a recurrent cell all at once (`candidates`, made from a `context`); the operations that
follow refute wrong ones.
``forms`` gives both programs one form first: sums, sums of products, lookups, constants that parameters meet. `factors` finds folded factors.
``grading`` finds alternatives that give the same outputs, proves the result with fresh weights, and names the operation where the
programs differ. `derivation` holds the result: for each tensor its parts, their evidence and a grade. `facts` reads what no weight
holds, and ``rule_file`` writes the rules. No names are compared.
May import `references`, `layers`, `programs`, `numerics` and `core`.
"""
