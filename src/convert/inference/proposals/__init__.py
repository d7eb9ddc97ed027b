"""Which parameters of the source an operand of the target may be: one module for each role."""
