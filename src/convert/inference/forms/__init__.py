"""Give both programs one form where they may write the same in several.

Constants: `constant_parts` takes apart what multiplies a constant that is joined with data; `sums` adds constants last; `biases` adds up
those of one sum; `as_data` finds those that parameters meet; `stacks` takes parameters apart that stand in one. Lookups: `lookups` takes
rows of one table at a time, `offsets` those of one field, `one_hot` finds them in products. Products: `contractions` finds them in sums,
`taps` convolutions in sums of products, `used_parts` takes apart one of which parts are used, `taken_columns` tells these parts, `joined`
that of values side by side; `distributed` takes that of a sum term by term, `commuted` moves one in front of a linear operation, or
behind it, `moved_factors` a number, and `three_factors` a vector behind the product of two values. `experts_apart` takes one expert after
the other. `reordered` takes sums and products in other orders, and `masks` leaves out what a softmax hides.
"""
