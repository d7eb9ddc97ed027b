"""Execute a plan: from leaves of the checkpoint to safetensors that appear complete or not at all.

`execute` runs the plan. `transfer` streams the leaves piece by piece, and `scatter` maps each piece to its destination.
`writer` lays out the files and maps them into memory; `atomic` makes them appear in one step, and so decides that an
output is complete. `provenance` and `model_card` say what was converted. May import planning, checkpoints, layers, core.
"""
