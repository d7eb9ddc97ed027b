"""What a store answered, as one clear error without credentials."""

from __future__ import annotations

import errno
import os
import re

from convert.core.errors import ConvertError
from convert.core.findings import Finding

_WRONG_NAME = re.compile(r'Path "(?P<name>.*)" contained|parsing Path "(?P<part>.*)": E', re.DOTALL)  # of obstore
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN")


class StoreError(OSError, ConvertError):
    """A store refused, or did not answer. Readers handle it as an error of the system; where none does, its text says what to do.

    Attributes:
        fix: the next step.
    """

    def __init__(self, problem: str, place: str, fix: str) -> None:
        ConvertError.__init__(self, Finding("file-not-readable", f"cannot be read: {problem}", path=place, fix=fix))
        self.errno, self.strerror, self.filename, self.fix = errno.EIO, problem, place, fix

    __str__ = ConvertError.__str__


class UnavailableError(StoreError):
    """A store did not answer; asking again may help."""


def missing_extra(scheme: str, package: str, extra: str, place: str) -> StoreError:
    """Return the error for a library that is not installed."""
    return StoreError(
        f"{scheme}:// needs {package}, which is not installed", place, f"run pip install 'ckpt-convert[{extra}]'"
    )


def gone(place: str, what: str) -> StoreError:
    """Return the error for an object that changed."""
    return StoreError(f"it {what} while it was read", place, "run again when nothing writes the checkpoint")


def refusal(text: str, place: str) -> StoreError | None:
    """Return the error for an answer that a repetition does not change; None for others."""
    if (wrong := _WRONG_NAME.search(text)) is not None:
        problem = f"{wrong['name'] or wrong['part']!r} has an empty part, `.`, `..` or a control character"
        return StoreError(problem, place, "correct the URL, or rename the object")
    status = re.search(r"status(?: code)?:? (\d{3})", text)
    code = re.search(r"<Code>(\w{1,60})</Code>", text)
    name = code[1] if code else ""
    if name == "NoSuchBucket":
        return StoreError("there is no such bucket", place, "correct the name of the bucket")
    if "Expired" in name or "ExpiredToken" in text:
        return StoreError(
            f"the credentials have expired ({name or 'ExpiredToken'})", place, "get new credentials, and run again"
        )
    number = int(status[1]) if status else 0
    if number in (401, 403) or re.search("Unauthenticated|lacked valid authentication", text[:60]):
        why = f"{number}{f', {name}' if name else ''}" if number else "no credentials"
        fix = "give credentials that may do this; docs/guides/object-stores.md says where they are looked for"
        return StoreError(f"the store refused the credentials ({why})", place, fix)
    if 400 <= number < 500 and number not in (408, 429):
        return StoreError(
            f"the store refused the request ({number}{f', {name}' if name else ''})",
            place,
            "check the URL and the region",
        )
    return None


def unavailable(text: str, place: str) -> UnavailableError:
    """Return the error for a store that did not answer."""
    status = re.search(r"status(?: code)?:? (\d{3})", text)
    why = f"the last answer was {status[1]}" if status else reason(text)
    return UnavailableError(f"the store did not answer, also when asked again ({why})", place, "run again later, or check the network")  # fmt: skip


def reason(text: str) -> str:
    """Return the last cause in the text of a library's error, in one line and without credentials."""
    text = text.partition("\n\nDebug source")[0]
    text = re.sub(r"\s+", " ", text.rpartition(" - ")[2] or text)
    text = re.sub(r"(?i)(x-amz-[a-z-]+|signature|token|authorization)[=:]\s*\S+", r"\1=...", text)
    for name in _SECRETS:
        if len(secret := os.environ.get(name, "")) > 3:
            text = text.replace(secret, "...")
    return text[:200]
