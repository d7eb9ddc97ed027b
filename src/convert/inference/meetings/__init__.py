"""Where data meets parameters in a program, and which of these places have the same data.

`sites` finds them, `columns`, `rows` and `data_products` compare their data, and `patches` makes a product of a convolution that uses each place once.
"""
