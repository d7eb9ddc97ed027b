"""Rules with `each`: one rule for all modules of a type. A table lists the modules of each class; config.json names the class.

`table` reads the lists of classes; `names` finds the module of a path; `expand` writes a rule for each group of modules, before
anything is matched, so that all other stages know rules with paths alone.
"""
