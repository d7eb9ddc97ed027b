"""``--push``: upload the output to the Hugging Face Hub after it was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from convert.cli import output
from convert.core.errors import ConvertError
from convert.core.findings import Finding

if TYPE_CHECKING:
    from convert.stores.publish import Target


def refuse(push: str | None, private: bool, given: dict[str, object]) -> Target | None:
    """Find the repository before anything is read; refuse options that do not go with it.

    Args:
        given: these options, and whether each was given.

    Raises:
        ConvertError: there is no token, the Hub refused, or an option does not go with ``--push``.
    """
    if push is None:
        if private:
            raise ConvertError(Finding("usage", "--private is for a repository of --push", fix="leave it out, or add --push"))  # fmt: skip
        return None
    for option, value in given.items():
        if value:
            raise ConvertError(Finding("usage", f"--push does not go with {option}", fix="leave one out"))
    from convert.stores import located
    from convert.stores.publish import find_target
    from convert.writing.destination.permitted import os_errors

    with os_errors(located(f"hf://{push.removeprefix('hf://')}")):
        return find_target(push)


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
