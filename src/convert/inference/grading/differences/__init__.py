"""Where the programs differ: `explained` names the operation, and whether that is `excluded` from being anything else, such as `split_columns` in another
order, or `other_weights` that are `fitted`; `resumed` continues behind it with values that are `given`, and `in_front` grades what was found.
`guessed` are weights with which they are equal after all.
`corrected` searches again with one of the `corrections`, by which a record is `changed`: of `functions` for which no weights `compensated`.
"""
