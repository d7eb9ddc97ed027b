"""``--push``: upload the output to the Hugging Face Hub after it was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from convert.cli import output

if TYPE_CHECKING:
    from convert.cli.conversion.request import Request
    from convert.stores.publish import Target


def repository(asked: Request) -> Target | None:
    """Find the repository of ``--push`` before anything is read; None without it.

    Raises:
        ConvertError: there is no token, the Hub refused, or an option does not go with ``--push``.
    """
    from convert.stores import located
    from convert.stores.publish import find_target
    from convert.writing.destination.permitted import os_errors

    if asked.push is None:
        return None
    with os_errors(located(f"hf://{asked.push.removeprefix('hf://')}")):
        return find_target(asked.push)


def push(out: Path, target: Target, private: bool, quiet: bool) -> str:
    """Upload the output; return the URL of the commit.

    Raises:
        ConvertError: the Hub refused, or did not answer.
    """
    from convert.stores import located
    from convert.stores.publish import push as upload
    from convert.writing.destination.permitted import os_errors
    from convert.writing.writer import of_model

    url = ""
    with os_errors(located(target.url)):
        for url in upload(out, target, private, of_model):
            if not quiet:
                output.status(f"uploaded {url}" if "://" not in url else f"pushed to {url}")
    return url
