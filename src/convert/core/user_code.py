"""Import functions that the user names as ``module:function``, and report their errors as errors of the user's code."""

from __future__ import annotations

import importlib
import inspect
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.core.errors import ConvertError, UserCodeError
from convert.core.findings import Finding
from convert.core.similarity import closest_match
from convert.core.system.signals import SignalExit

REFERENCE_OPTION = "--reference "  # the option that names the two models of a check; prefix of `path` in findings
ANY = 1e-5  # similarity of two names of which nearly nothing is the same
NEAREST = 5  # names of leaves in place of one that is missing
MAX_TEXT = 500  # characters of an exception's text; those of JAX and torch can fill pages
OF_THE_PROGRAM = (KeyboardInterrupt, GeneratorExit, SignalExit)  # what ends this program, or closes a generator of it
PACKAGES = ("site-packages", "dist-packages")
STANDARD = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib"))


def find_factory(factory: str, option: str = "") -> Callable[..., Any]:
    """Import the function that ``module:function`` names. The module may be in the working directory.

    Args:
        factory: ``module:function``.
        option: as in `user_code_errors`.

    Raises:
        ConvertError: the text has another form, the module cannot be imported, or it has no such function.
        UserCodeError: the code of the module raised an error.
    """
    module, colon, name = factory.partition(":")
    if not colon or not module or not name:
        expected = "module:function, such as my_package.model:make"
        raise ConvertError(Finding("user-code-not-found", path=option.strip(), expected=expected, got=repr(factory)))
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        with user_code_errors(factory, option):
            function: Any = importlib.import_module(module)
    except ImportError as error:
        frames = _frames(error, factory)
        where = f" ({_place(frames[-1])})" if frames else ""
        fix = "install the package, or run the command in the folder of the module"
        raise ConvertError(
            Finding("user-code-not-found", f"{error}{where}", path=f"{option}{factory}", fix=fix)
        ) from error
    try:
        for part in name.split("."):
            function = getattr(function, part)
    except AttributeError:
        raise ConvertError(
            Finding("user-code-not-found", f"{module} has no {name!r}", path=f"{option}{factory}")
        ) from None
    if not callable(function):
        got = type(function).__name__
        raise ConvertError(Finding("user-code-not-found", path=f"{option}{factory}", expected="a function", got=got))
    return function  # type: ignore[no-any-return]


def signature_error(function: Callable[..., Any], arguments: Sequence[str] = ()) -> TypeError | None:
    """Return why a function cannot be called with these arguments; None if it can, or if its signature is unknown."""
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
def user_code_errors(
    factory: str | None, option: str = "", leaves: Collection[str] = (), inputs: Collection[str] = ()
) -> Iterator[None]:
    """Report errors that the user's code raises as `UserCodeError`, with file and line.

    Not changed are errors of this package, a package that is not installed (which may be a reason to skip), and errors
    without a stack frame in the user's code, which are bugs of this package. The program itself is ended by a signal alone.

    Args:
        factory: ``module:function`` of the user; None if the code is part of this package: then nothing is changed.
        option: the option that named it, with a space at its end; the path of the finding begins with it.
        leaves: names by which the code is given leaves; an error about another name lists the nearest.
        inputs: names by which it is given inputs beside them, for the same error.

    Raises:
        UserCodeError: the user's code raised an error or tried to exit the program (any other `BaseException`).
    """
    try:
        yield
    except UserCodeError as error:  # it returned a wrong value; add where the code comes from
        if factory is None:
            raise
        finding = error.findings[0]
        raise UserCodeError(replace(finding, path=finding.path or f"{option}{factory}"), error.frames) from error
    except (ConvertError, ModuleNotFoundError, *OF_THE_PROGRAM):
        raise
    except BaseException as error:
        frames = _frames(error, factory) if factory is not None else []
        if factory is None or (not frames and isinstance(error, Exception)):
            raise
        raise _failed(error, frames, f"{option}{factory}", leaves, inputs) from error


def exit_of_user_code(error: BaseException) -> UserCodeError | None:
    """Return the error of code of the user that tried to exit the program, wherever it was called; None for any other error."""
    if isinstance(error, (Exception, *OF_THE_PROGRAM)) or not (frames := _frames(error)):
        return None
    return _failed(error, frames, "")


def is_of_user_code(error: BaseException) -> bool:
    """Whether an error passed through code that belongs neither to this package nor to an installed one."""
    return bool(_frames(error))


def _failed(
    error: BaseException,
    frames: Sequence[traceback.FrameSummary],
    path: str,
    leaves: Collection[str] = (),
    inputs: Collection[str] = (),
) -> UserCodeError:
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
    where = f" ({_place(frames[-1])})" if frames else ""  # a builtin, such as sys.exit, has no frame
    problem = f"{type(error).__name__}{f': {text}' if text else ''}{where}"
    fix = "correct your code there, or the code that it calls, and try again"
    expected = got = ""
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and leaves:
        name = error.args[0]
        of_inputs = f" or of an input ({', '.join(inputs)})" if inputs else ""
        expected = f"the name of a leaf that the code is given ({_nearest(name, leaves)}){of_inputs}"
        got = repr(name)
    return UserCodeError(
        Finding("user-code-failed", problem, path=path, expected=expected, got=got, fix=fix),
        tuple(f"{_place(frame)}{f': {frame.line}' if frame.line else ''}" for frame in frames),
    )


def _nearest(name: str, leaves: Collection[str]) -> str:
    """Return some names of leaves, the nearest to a name first; those that are nothing like it come last."""
    left, near = list(leaves), list[str]()
    while left and len(near) < NEAREST:
        near.append(closest_match(name, left, ANY) or left[0])
        left.remove(near[-1])
    more = f" and {len(left)} more" if left else ""
    return f"{', '.join(near)}{more}"


def _frames(error: BaseException, factory: str = "") -> list[traceback.FrameSummary]:
    """Return the stack frames of the user's code: neither of this package nor of installed ones."""
    package = factory.partition(":")[0].split(".")[0]
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        code, module = frame.f_code, str(frame.f_globals.get("__name__", "")).split(".")[0]
        if module == __name__.split(".")[0]:
            continue
        if module == package or _is_user_code(code.co_filename):
            source = linecache.getline(code.co_filename, line).strip()
            frames.append(traceback.FrameSummary(code.co_filename, line, code.co_name, line=source))
    if (
        isinstance(error, SyntaxError) and error.filename and _is_user_code(error.filename)
    ):  # a syntax error has no frame, as nothing ran
        source = (error.text or "").strip()
        frames.append(traceback.FrameSummary(error.filename, error.lineno or 0, "<module>", line=source))
    return frames


def _is_user_code(file: str) -> bool:
    path = Path(file)
    return not (file.startswith("<") or set(PACKAGES) & set(path.parts) or any(map(path.is_relative_to, STANDARD)))


def _place(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename).resolve()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{frame.lineno}{'' if frame.name == '<module>' else f', in {frame.name}'}"
