"""The way through a segment of the target, from one value that both programs have to the next.

`segments` has what is found: solutions, and how much was tried. `assigned` is what is known so far, `of_source` compares what the
target gives with it, and `walk` runs the target on, proposes what is not known, and refutes.
"""
