"""Rules with `each`: one rule for all modules of a type. A table lists the modules of each class; config.json names the class.

`table` reads the lists of classes (`formulas`: numbers that follow from config.json; `blocks`: its lists with a value for each
block); `names` finds the module of a path; `expand` writes a rule for each group of modules, before anything is matched, so that
all other stages know rules with paths alone. `differences` reports what a tree and its class do not have in common, `switches` the
key of config.json that explains it, `sizes` sizes that config.json contradicts, and `not_taken` values that the class does not
take.
"""
