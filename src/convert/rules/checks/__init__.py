"""What a rule file must hold before any checkpoint is read: `validate` runs the checks and lists every problem.

`rule` checks one rule (its letters by `axes`), `header` what stands above the rules and what the rules say together (its `allowed`
and `layouts` by the modules of these names).
"""
