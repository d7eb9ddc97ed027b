"""Orbax checkpoints, read with TensorStore: the layouts of Orbax 0.5 to 0.12, without JAX and without devices.

`locate` finds the directory of the tree, `tree` reads the names of its leaves, `stores` opens the key-value store that holds
the arrays, `zarr_metadata` reads the shape, dtype and chunks of each array, `arrays` reads the values, and `reader` joins
them to a `Source`. The modules import each other in this order. May import `convert.core`, and of `convert.checkpoints`
everything but ``formats`` and `files`.
"""
