"""Control paths of neural CDEs: diffrax's interpolations as torchcde stores them.

`declaration` < `compile` (the steps) < `kinds`; `probe` and `mistakes` serve the checks. May import `convert.core`, and of
`convert.layers` the modules next to the folders.
"""
