"""Give both programs one form where they may write the same in several.

`lookups` takes rows of one table at a time, `offsets` those of one field, `constant_parts` what a constant joined with data is multiplied by, `contractions` takes matrix products, `sums` adds constants last,
`used_parts` takes a product apart of which parts are used,
`masks` leaves out what a softmax hides, `reordered` takes sums and products in other orders, `commuted` takes products in front of a linear
operation or behind it, `joined` takes the products of values that stand side by side one at a time, and `as_data` finds constants and parameters that other parameters meet.
"""
