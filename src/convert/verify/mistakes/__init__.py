"""Known wrong conversions of one tensor (`Mistake`), to name what a check finds.

`catalogue` lists the mistakes with a tensor: those of its kind of layer (`LayerKind.mistakes` in convert.layers) and those
that any tensor may have; `layouts`, `low_rank`, `sums` and `integers` hold four groups of the latter. Where the written tensor equals that of a
mistake bit for bit, the weights level names it; where the tensor of a mistake makes both models equal, it is the diagnosis of
the model level. May import everything below `verify`, and of `verify` nothing else.
"""
