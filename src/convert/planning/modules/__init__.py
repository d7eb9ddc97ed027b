"""Rules that hold for every module of a type: a rule file names no module, and the class that config.json names has a list of them.

`table` reads the lists of classes; `names` finds the module of a path; `expand` writes a rule for each group of modules, before
anything is matched, so that all other stages know rules with paths alone.
"""
