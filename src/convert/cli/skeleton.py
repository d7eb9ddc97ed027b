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
            help="Function without arguments that returns what was saved: the model, or (model, state).",
        ),
    ],
) -> None:
    """Print the names of an Equinox model's arrays as JSON, in the order in which Equinox saves them.

    An Equinox file stores no names. Run this command where JAX and the model's code are installed, with its output in a file.
    The other commands read it with --skeleton skeleton.json.
    """
    from convert.checkpoints.formats.skeleton import write_skeleton

    with output.prints_to_stderr():
        found = write_skeleton(factory)
    output.data(found)
