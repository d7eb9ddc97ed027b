"""What the record of a target gives when parts of its code are called otherwise: a hypothesis that restores the output is proven.

`recurrences` changes the states, gates and directions of loops, `positions` RoPE, the norms beside it and the rows of tables, `places` the order of
operations, parts, axes and copies. `norm_axes` takes the moments of norms over other axes, `paddings` pads convolutions otherwise, and `factors`
moves a scale between weights and code, which changes no output. `rewrite` is the hypothesis. May import `divergence`.
"""
