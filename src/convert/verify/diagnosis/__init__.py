"""Name the mistake at the first place where the two models differ.

`diagnose` builds a `Site` (site.py; found_boundaries.py adds boundaries), then runs one search after another: weight_trials tries wrong
tensors, and whole_model does so with outputs alone; calls/ runs the whole model with other calls of torch; norm, padding, recurrence and
variants try other functions by comparing what each side computes (compare.py); other_order tries other orders of values; wrong_reference
tries the reference itself; other_operation compares the records of both models operation by operation. The first hypothesis that restores
parity is the diagnosis. Without one, what_is_known.py says what is equal in front of the difference, and unused.py which tensors the
target never uses. May import `verify.sides`, `verify.mistakes` and what lies below them.
"""
