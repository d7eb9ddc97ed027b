"""Products: `contractions` finds them in sums, `taps` convolutions in sums of products, `distances`
squared distances in those of differences; `used_parts` takes apart one of which parts are
used, `chosen_matrices` a product of each row with its own of several matrices, `taken_columns` tells these parts, `taken_rows` takes rows of a table behind it and `rows_of_data` those of data, `joined` that of values side by side; `repeated` takes one once whose data is repeated; `distributed`
takes that of a sum term by term, `commuted` moves one in front of a linear operation or behind it, `constant_factors` a constant,
`moved_factors` a number of parameters, `row_factors` a number for each row, and `three_factors` a vector behind the product of two values.
"""
