"""Decoders of the byte formats inside checkpoints, which know neither files of a format nor its trees.

`msgpack_tokens` steps through msgpack and `flax_arrays` finds the arrays in it, `npy_header` reads headers of NumPy arrays,
`pytreedef` parses the text of a JAX tree, `zarr_chunks` decodes chunks and `ocdbt` lists the keys of a database. A
decoder raises errors without a path; its reader adds it. May import `convert.core`, and of this package `chunks` and `errors`.
"""
