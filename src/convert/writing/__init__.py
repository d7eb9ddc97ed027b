"""Execute a plan: from leaves of the checkpoint to safetensors that appear complete or not at all.

`execute` runs the plan. `transfer` streams the leaves piece by piece, and `scatter` maps each piece to its destination.
`file_layout` decides the bytes of each tensor, `writer` maps the files into memory. `complete.check_complete` alone decides that an output is complete;
`Writer.commit` calls it first, and then lets the `destination` make the output appear. `provenance` and `model_card`
describe what was converted, `digests` lets the output be checked without its source. Another run continues an unfinished output if
`conversion_identity` is the same. `written` opens such files again. May import `planning`, `checkpoints`, `layers` and `core`.
"""
