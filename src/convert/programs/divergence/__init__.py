"""Where one program departs from another: `search` finds the operations (a `repair` for each) and proves them, `wording` names them for a person.

`naming` has the questions that lead to a name. `shared_values` finds values of one program in the other, in
any layout; `layouts` lays a value out as the other has it; `rerun` runs a record with other values in it; `kinds` has one word for the
same operation of JAX and of PyTorch, `words` those for a sentence.
"""
