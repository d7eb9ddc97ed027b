"""Record what a JAX model computes, and check against the recording where JAX is not installed.

`record` writes one safetensors file; manifest.py is its JSON header, file.py reads it back without trusting it. match.py
decides whether a recording belongs to the file that is checked; source.py stands in for the checkpoint by computing leaves
back from the written weights, and weights.py compares their checksums. May import `verify.sides`, `verify.mistakes`,
`verify.weights`, `writing` and what lies below them.
"""
