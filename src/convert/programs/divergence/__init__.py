"""Where one program departs from another: `search` finds the operations and proves them, `wording` names them for a person.

`description` has the questions that lead to a name, one after the other. `shared_values` finds values of one program in the other, in
any layout; `layouts` lays a value out as the other has it; `rerun` runs a record with other values in it; `kinds` has one word for the
same operation of JAX and of PyTorch.
"""
