"""Which elements of the values no output depends on: `perturbed` runs an operation with other numbers, `certain` finds what no
parameter changes, `influence` what an operation makes of which elements, `shown` goes through a program, and `always_zero` finds what meets zeros alone."""
