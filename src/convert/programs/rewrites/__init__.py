"""What the record of a target gives when parts of its code are called otherwise: a hypothesis that restores the output is proven.

`rope` turns queries and keys as the source does, as `rotations` measures it; `norm_order` moves norms to the other side of RoPE, and
`residual` to the other side of the addition of a residual; `rows` takes other rows of a table, and `copies`
repeats heads in another order; `states` gives the states of a recurrence on, `first_states` begins it otherwise,
`given_out` joins those in front of the steps, or behind them, `updates` reads them before their update or behind it, `cut_states` gives on what
is set to zeros between steps, and `gates` moves its gates; `direction` turns loops round;
`exchange` gives parts of a value, what is joined, and the states of a loop, for each other, and `order` runs operations of a chain (`segments`) in another order. `axes` exchanges axes
and splits one into its parts in another order, `paddings` pads convolutions otherwise, and `shared` uses a value again that the target
computes anew. `norm_axes` takes the moments of norms over other axes; `relative_positions` says what differs in the rows that `rows` takes by distance. `factors` moves a
scale between weights and code, which changes no output. May import `divergence`.
"""
