"""Object stores, web servers and the Hugging Face Hub as places of checkpoints: URLs as paths.

`located` turns what a user gave into a path: a local one stays as it is, a URL becomes a `StorePath` (`path`), whose methods ask
the store (`client`) instead of the system. All readers open files through `core.system.regular_file`, and so read both.
`upload` writes objects to S3 and Google Cloud Storage, `publish` commits to the Hub. The libraries are extras and imported on first use. May import `convert.core`.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from convert.core.errors import OptionError
from convert.core.findings import Finding
from convert.core.system.regular_file import ObjectPath
from convert.stores.path import StorePath

_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+):/{1,2}(?P<rest>[^/].*)", re.DOTALL)  # `Path` joins two slashes to one
_SCHEMES = ("s3", "gs", "hf", "http", "https")
# no place of a checkpoint here, and no name of a local folder
_OTHERS = ("azure", "az", "abfs", "abfss", "ftp", "file", "gcs", "hdfs", "oci", "r2", "sftp", "ssh")


def located(path: str | Path) -> Path:
    """Return the path that a user gave: of this machine, or a `StorePath` where it is a URL.

    Raises:
        OptionError: a URL of a scheme that is not read, or one that holds a password or a signature.
    """
    if isinstance(path, ObjectPath):
        return path
    match = _URL.fullmatch(str(path))
    if match is None or match["scheme"] not in (*_SCHEMES, *_OTHERS):
        return Path(path)
    scheme, rest = match["scheme"], match["rest"].rstrip("/")
    if scheme not in _SCHEMES:
        raise _refused(f"{scheme}://", f"one of {', '.join(f'{each}://' for each in _SCHEMES)}", f"{scheme}://", "copy the checkpoint to one of these, or to a disk")  # fmt: skip
    host = rest.partition("/")[0]
    web = scheme.startswith("http")
    if "@" in host or (web and re.search("[?#]", rest)):  # it would stand in messages and in the model card
        shown = f"{scheme}://{host.rpartition('@')[2]}/..."
        raise _refused(shown, "a URL without a password and without a query", "one with them", "give the credentials to a store by its environment variables")  # fmt: skip
    if web:
        rest = unquote(rest)
    if scheme == "hf" and "/" not in rest:
        raise _refused(f"hf://{rest}", "hf://owner/name", rest, "name the owner of the repository, too")
    found = StorePath(f"{scheme}:/{rest}")
    found.bucket.forget()
    return found


def _refused(shown: str, expected: str, got: str, fix: str) -> OptionError:
    return OptionError(Finding("store-url", path=shown, expected=expected, got=got, fix=fix))


__all__ = ["StorePath", "located"]
