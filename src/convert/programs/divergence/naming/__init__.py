"""The name of a repair, and its sentence: `description` asks one question after another, the first answer is the name.

`operations` has the questions about what the two sides compute, `operands` those about what they are given, and `computed_tables` those about
tables and functions of parameters. `both` is a repair with the words of both programs. The others tell what a question needs to know:
`functions` and `by_functions` name what operations compute, `whole_functions` joins the differences within one function, `norms` what is
normalised over, `windows` what convolutions and pools read, `selections` which elements are taken, `tables` what tables hold, `details` all
else.
May import the modules of `divergence`, but not `wording`.
"""
