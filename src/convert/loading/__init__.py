"""Fills a PyTorch module from a checkpoint, or gives its tensors one by one, without a file in between.

`module` fills a module piece by piece, `slots` finds where its tensors lie, and `tensors` is a lazy mapping of the tensors of a
plan, which `step_values` reads without torch. The only folder that imports torch to convert. May import `writing`, `planning`, `checkpoints`, `layers` and `core`.
"""
