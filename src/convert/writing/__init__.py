"""Execute a plan: from leaves of the checkpoint to safetensors that appear complete or not at all.

`execute` runs the plan. `transfer` streams the leaves piece by piece, and `scatter` maps each piece to its destination.
`writer` lays out the files and maps them into memory. `Writer.commit` decides that an output is complete: it refuses one
with tensors that were never requested. `AtomicOutput.publish` makes a complete output appear, by renaming it.
`provenance` and `model_card` describe what was converted. May import planning, checkpoints, layers, core.
"""
