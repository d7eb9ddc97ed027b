"""Name the mistake at the first place where the two models differ.

`diagnose` builds a `Site` (site.py), then runs one search after another: weight_trials tries wrong tensors; norm, padding,
recurrence and variants try other functions by comparing what each side computes (compare.py); other_operation compares the
records of both models operation by operation. The first hypothesis that restores parity is the diagnosis. May import `verify.sides`, `verify.mistakes` and what lies below them.
"""
