"""Functions of the user's own code, named on the command line as ``module:function``, and what it means when they fail."""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convert.core.errors import ConvertError, UserCodeError

REFERENCE_OPTION = "--reference "  # the option that names the two models of a check
LONGEST = 500  # characters of an exception's text; JAX's and torch's may take pages
PACKAGES = ("site-packages", "dist-packages")
STANDARD = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))


def find_factory(factory: str, option: str = "") -> Callable[..., Any]:
    """Imports the function that ``module:function`` names; the module may lie in the working directory.

    Args:
        option: as in `user_code_errors`.

    Raises:
        ConvertError: the words are none such, the module cannot be imported, or it has no such function.
        UserCodeError: the module's own code failed.
    """
    module, colon, name = factory.partition(":")
    if not colon or not module or not name:
        raise ConvertError(f"{option}{factory!r}: expected module:factory, such as my_package.model:make")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        with user_code_errors(factory, option):
            found: Any = importlib.import_module(module)
    except ImportError as error:
        frames = _frames(error, factory)
        where = f" ({_place(frames[-1])})" if frames else ""
        raise ConvertError(f"{option}{factory}: {error}{where}") from error
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConvertError(f"{option}{factory}: {module} has no {name!r}") from None
    if not callable(found):
        raise ConvertError(f"{option}{factory}: {name} cannot be called; it must be a function")
    return found  # type: ignore[no-any-return]


def signature_error(function: Callable[..., Any], arguments: Sequence[str] = ()) -> TypeError | None:
    """Why a function cannot be called with these arguments; None when it can be, or does not say what it takes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return error
    return None


@contextmanager
def user_code_errors(factory: str | None, option: str = "") -> Iterator[None]:
    """Around what runs the user's code: what that raises is said to be its own, with file and line.

    Errors of this package pass as they are, and so does a package that is not installed, as it may be a reason to skip; and what
    was raised without a line of the user's code on the way, as it is then a fault of this package.

    Args:
        factory: ``module:function`` of the user; None: the code is none of the user's, and everything passes.
        option: by which it was named, with a space behind; messages begin with it.

    Raises:
        UserCodeError: the user's code raised something, or tried to leave the program.
    """
    try:
        yield
    except UserCodeError as error:  # what it gave is not what was asked for
        if factory is None:
            raise
        raise UserCodeError(f"{option}{factory}: {error.said}", error.frames) from error
    except (ConvertError, ModuleNotFoundError):
        raise
    except (Exception, SystemExit) as error:
        frames = _frames(error, factory) if factory is not None else []
        if not frames:
            raise
        text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        raise UserCodeError(
            f"{option}{factory}: {type(error).__name__}{f': {text}' if text else ''} ({_place(frames[-1])}). "
            "This is code of your own, or was called by it: correct it there, and try again",
            tuple(f"{_place(frame)}{f': {frame.line}' if frame.line else ''}" for frame in frames),
        ) from error


def _frames(error: BaseException, factory: str) -> list[traceback.FrameSummary]:
    """Those of the calls down to the error that are the user's: neither of this package nor of installed ones."""
    package = factory.partition(":")[0].split(".")[0]
    found = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code, module = frame.f_code, str(frame.f_globals.get("__name__", "")).split(".")[0]
        if module == __name__.split(".")[0]:
            continue
        if module == package or _is_own(code.co_filename):
            source = linecache.getline(code.co_filename, line).strip()
            found.append(traceback.FrameSummary(code.co_filename, line, code.co_name, line=source))
    if (
        isinstance(error, SyntaxError) and error.filename and _is_own(error.filename)
    ):  # it has no frame: nothing has run
        source = (error.text or "").strip()
        found.append(traceback.FrameSummary(error.filename, error.lineno or 0, "<module>", line=source))
    return found


def _is_own(file: str) -> bool:
    path = Path(file)
    return not (file.startswith("<") or set(PACKAGES) & set(path.parts) or any(map(path.is_relative_to, STANDARD)))


def _place(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename).resolve()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno}{'' if frame.name == '<module>' else f', in {frame.name}'}"
