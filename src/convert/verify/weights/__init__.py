"""Level 2, weights: run the plan again and compare every written tensor bit for bit with the result.

`level` compares; `diagnose` finds the mistake behind each wrong tensor (`name_tensor`: `verify.mistakes`, then `corruption/`,
then `from_others`), and `causes` makes one finding of the tensors with one cause; `provenance` compares the
checkpoint, rules and facts that the metadata records; `tied` compares the copies of a tied table. May import `mistakes` and `report`, and
everything below `verify`.
"""
