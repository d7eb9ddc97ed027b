"""Give both programs one form where they may write the same in several.

`lookups` takes rows of one table at a time, `contractions` takes matrix products, `sums` adds constants last, `reordered` takes sums and products in other orders, and
`as_data` finds constants and parameters that other parameters meet.
"""
