"""Write a record in real numbers: every complex value is two real ones, and the operations between them are real arithmetic.

A complex parameter, input or output is one real array whose last axis has the two parts, as `torch.view_as_real` gives it. A
rotation that one program writes as a complex product, and the other with a sine and a cosine, is then the same arithmetic.
`parts` is what a complex value becomes, `operations` adds operations to a record, `arithmetic` says what a complex operation is made of, and
`rewriting` goes through a record. May import `program` alone.
"""
