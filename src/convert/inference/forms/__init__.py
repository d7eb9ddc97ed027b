"""Give both programs one form where they may write the same in several: of `lookups` in tables, of `sums`, of `products`;
`hidden` leaves out the elements that no output depends on.

`as_data` finds constants and learned inputs that parameters meet, `experts_apart` takes one expert after the other, `chunks_together` all
chunks of a value at once; `kernels` finds what a kernel may compute that nothing looks into; `used_late` puts operations in front of
their first use. `elements` follows the elements that an operation moves; it is what all others use.
"""
