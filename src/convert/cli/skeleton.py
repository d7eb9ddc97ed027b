"""``convert skeleton MODULE:FACTORY``"""

from __future__ import annotations

from convert.cli import options as o
from convert.cli import output


@o.command(
    o.Argument(
        "factory",
        "A function without arguments that returns what was saved: the model, or (model, state).",
        metavar="MODULE:FACTORY",
    )
)
def skeleton(factory: str) -> None:
    """Print the names, shapes and dtypes of a model's arrays as JSON, in the order in which Equinox saves them.

    Run it where JAX and the model's code are: convert skeleton my_model:make > skeleton.json. An Equinox file has no names;
    the other commands take them with --skeleton skeleton.json.
    """
    from convert.checkpoints.formats.skeleton import write_skeleton

    output.data(write_skeleton(factory))
