"""Propose parameters of the source for an operand of the target: a module for each role of the operand. `column_orders` and `fillings` are of products."""
