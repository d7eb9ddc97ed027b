"""``convert skeleton MODULE:FACTORY``"""

from __future__ import annotations

from typing import Annotated

import typer

from convert.cli import output


def skeleton(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A function without arguments that returns what was saved: the model, or (model, state).",
            show_default=False,
        ),
    ],
) -> None:
    """Print the names, shapes and dtypes of a model's arrays as JSON, in the order in which Equinox saves them.

    Run it where JAX and the model's code are: convert skeleton my_model:make > skeleton.json. An Equinox file has no names;
    the other commands take them with --skeleton skeleton.json.
    """
    from convert.sources.skeleton import write_skeleton

    output.data(write_skeleton(factory))
