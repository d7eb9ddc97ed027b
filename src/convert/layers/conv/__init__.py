"""Convolutions and transposed convolutions.

`dimension_numbers`, `padding` and `standardization` read keys < `conv` < `transpose`; `kernel_forms` guesses what a kernel
is, for `draft`; `probe` and `mistakes` serve the checks. May import `convert.core`, and of `convert.layers` the modules next
to the folders and `transforms`.
"""
