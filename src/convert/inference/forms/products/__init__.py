"""Products: `contractions` finds them in sums, `taps` convolutions in sums of products, `distances`
squared distances in those of differences; `used_parts` takes apart one of which parts are
used, `taken_columns` tells these parts, `joined` that of values side by side; `distributed` takes that of a sum term by term, `commuted`
moves one in front of a linear operation or behind it, `moved_factors` a number, and `three_factors` a vector behind the product of two
values."""
