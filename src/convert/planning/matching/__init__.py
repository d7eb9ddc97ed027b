"""Stage 1 of a plan: match each leaf with a rule. `match` does it; `findings` lists what does not fit.

The findings are of three kinds: `claims` (leaves without a rule, or with two), `missing` (leaves that a rule expects) and `layer_gaps`
(layers that some leaves have and others lack). They follow from what matching found (`facts`).
"""
