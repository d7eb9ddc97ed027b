"""Level 2, weights: run the plan again and compare every written tensor bit for bit with the result.

`level` compares and names the mistake behind a wrong tensor (`verify.mistakes`, `corruption`); `provenance` compares the
checkpoint, rules and facts that the metadata records; `tied` compares the copies of a tied table. May import `mistakes`, `numerics`, `report` and `written`, and
everything below `verify`.
"""
