"""Errors of checkpoints: one function for each code that several readers use, and `located`, which adds the place.

A decoder knows what is wrong with its bytes, but not which file or leaf they belong to. It raises an error without a
place, and the reader that called it adds the place.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert.core.errors import CheckpointError
from convert.core.findings import Finding

COPY_AGAIN = "copy the checkpoint again from where it was written"
RENAME = "rename one of the two where the checkpoint is written"
UNFINISHED = "checkpoint-unfinished"
MOST_KEYS = 100  # of a path; the time of many steps grows with the square of this


def located(error: CheckpointError, path: str | Path, leaf: str | None = None, fix: str = "") -> CheckpointError:
    """Return the same error with its place before what the findings already name.

    Args:
        error: what a decoder raised.
        path: the file or directory.
        leaf: the name of the leaf, where the error is about one.
        fix: the next step, instead of the one in the findings.
    """
    place = _place(path, leaf)
    return CheckpointError(
        *(
            replace(
                finding,
                path=f"{place['path']}: {finding.path}" if finding.path else place["path"],
                fix=fix or finding.fix,
                data={**finding.data, **place.get("data", {})},
            )
            for finding in error.findings
        )
    )


def _place(path: str | Path, leaf: str | None) -> dict[str, Any]:
    """Return the fields of a finding that name a leaf of a file, or the file alone."""
    return {"path": str(path)} if leaf is None else {"path": f"{path}: leaf {leaf}", "data": {"leaf": leaf}}


def corrupt(
    problem: str = "",
    path: str | Path = "",
    leaf: str | None = None,
    *,
    expected: str = "",
    got: str = "",
    fix: str = COPY_AGAIN,
) -> CheckpointError:
    """Return the error for bytes that do not follow the format, or for two parts that contradict each other."""
    return CheckpointError(
        Finding("checkpoint-corrupt", problem, expected=expected, got=got, fix=fix, **_place(path, leaf))
    )


def truncated(
    problem: str,
    path: str | Path = "",
    leaf: str | None = None,
    *,
    expected: str = "",
    got: str = "",
    fix: str = COPY_AGAIN,
) -> CheckpointError:
    """Return the error for a file that ends before its content does."""
    return CheckpointError(
        Finding("checkpoint-truncated", problem, expected=expected, got=got, fix=fix, **_place(path, leaf))
    )


def incomplete(
    problem: str,
    path: str | Path = "",
    leaf: str | None = None,
    *,
    expected: str = "",
    got: str = "",
    fix: str = COPY_AGAIN,
) -> CheckpointError:
    """Return the error for a checkpoint of which a file or directory is missing."""
    return CheckpointError(
        Finding("checkpoint-incomplete", problem, expected=expected, got=got, fix=fix, **_place(path, leaf))
    )


def too_deep(path: str | Path, keys: Sequence[str]) -> CheckpointError:
    """Return the error for a leaf whose path has more than `MOST_KEYS` keys."""
    leaf = f"{'/'.join(keys[:5])}/..."[:100]
    return corrupt("the tree is too deep", path, leaf, expected=f"at most {MOST_KEYS} levels", got=str(len(keys)))


def unsupported(
    problem: str, path: str | Path = "", leaf: str | None = None, *, expected: str = "", got: str = "", fix: str = ""
) -> CheckpointError:
    """Return the error for a valid file that uses a feature which is not read here."""
    return CheckpointError(
        Finding("checkpoint-unsupported", problem, expected=expected, got=got, fix=fix, **_place(path, leaf))
    )


def unreadable(
    path: str | Path, error: Exception, leaf: str | None = None, fix: str = "check its permissions and the disk"
) -> CheckpointError:
    """Return the error for a file that the operating system or a library cannot read."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    fix = getattr(error, "fix", fix)  # of a store
    if any(os.strerror(number) in reason for number in (errno.EMFILE, errno.ENFILE)):  # TensorStore gives no number
        fix = "allow more open files (`ulimit -n 4096`), or give a smaller --jobs"
    problem = f"cannot be read: {reason}"
    return CheckpointError(Finding("checkpoint-unreadable", problem, fix=fix, **_place(path, leaf)))


def parse_json(text: bytes, path: str | Path) -> Any:
    """Parse JSON whose strings name leaves or files.

    Raises:
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
        CheckpointError: a string is not Unicode text, so that it can be no name.
    """
    parsed = json.loads(text)
    if b"\\ud" in text.lower():  # escaped surrogates, which are characters in pairs only
        try:
            json.dumps(parsed, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            wrong = error.object[error.start : error.end]
            raise corrupt("", path, expected="Unicode text", got=f"half of a surrogate pair, {wrong!r}") from None
    return parsed


def out_of_memory(path: str | Path, leaf: str | None, problem: str) -> CheckpointError:
    """Return the error for an array that does not fit into memory."""
    return CheckpointError(
        Finding("out-of-memory", problem, fix="use a machine with more memory", **_place(path, leaf))
    )


def link_refused(
    problem: str, path: str | Path, leaf: str | None = None, *, expected: str = "", got: str = "", fix: str
) -> CheckpointError:
    """Return the error for a path in a checkpoint that leads out of it."""
    return CheckpointError(
        Finding("checkpoint-link-refused", problem, expected=expected, got=got, fix=fix, **_place(path, leaf))
    )


def name_clash(path: str | Path, name: str, fix: str = RENAME) -> CheckpointError:
    """Return the error for two leaves that would have one name."""
    problem = f"two leaves have the name {name!r}"
    return CheckpointError(Finding("leaf-name-clash", problem, "", str(path), fix=fix, data={"leaf": name}))


def option_rejected(path: str | Path, problem: str, fix: str) -> CheckpointError:
    """Return the error for an option that does not apply to this checkpoint."""
    return CheckpointError(Finding("checkpoint-option", problem, "", str(path), fix=fix))


def missing(path: str | Path) -> CheckpointError:
    """Return the error for a path that does not exist."""
    return CheckpointError(
        Finding("checkpoint-missing", "there is no such file or directory", "", str(path), fix="correct the path")
    )


def unknown_format(
    path: str | Path, *, expected: str = "", got: str = "", fix: str = "", lines: tuple[str, ...] = ()
) -> CheckpointError:
    """Return the error for a file or directory that is not a checkpoint of the expected format."""
    return CheckpointError(Finding("checkpoint-unknown-format", "", "", str(path), expected, got, fix), lines=lines)


def unfinished(path: str | Path, problem: str, fix: str) -> CheckpointError:
    """Return the error for a checkpoint whose save is still running, or was interrupted."""
    return CheckpointError(Finding("checkpoint-unfinished", problem, "", str(path), fix=fix))


def ambiguous(path: str | Path, problem: str, fix: str) -> CheckpointError:
    """Return the error for a path that holds several checkpoints, steps or items that could be meant."""
    return CheckpointError(Finding("checkpoint-ambiguous", problem, "", str(path), fix=fix))


def step_not_found(path: str | Path, step: int, steps: Iterable[int]) -> CheckpointError:
    """Return the error for a step that the checkpoint does not have."""
    return CheckpointError(
        Finding(
            "step-not-found",
            f"there is no step {step}",
            path=str(path),
            expected=f"one of {list_numbers(steps) or 'no finished step'}",
            got=str(step),
            fix="choose one of these with --step",
            data={"step": step, "steps": sorted(steps)},
        )
    )


def step_chosen(step: int, steps: Iterable[int] = (), skipped: Iterable[str] = ()) -> Finding:
    """Return the note that says which step is read, of which steps, and which are not finished."""
    steps, skipped = sorted(steps), list(skipped)
    text = f"step {step} of {list_numbers(steps)}" if steps else f"step {step}"
    text += f" (not finished: {', '.join(skipped)})" if skipped else ""
    return Finding("step-chosen", text, data={"step": step, "steps": steps, "not_finished": skipped})


def note(problem: str) -> Finding:
    """Return a note about a checkpoint, for people."""
    return Finding("checkpoint-note", problem)


def list_numbers(numbers: Iterable[int]) -> str:
    """Return the numbers in order, separated by commas; of many, the first and last three."""
    numbers = sorted(numbers)
    if len(numbers) > 12:
        return f"{', '.join(map(str, numbers[:3]))}, ... {', '.join(map(str, numbers[-3:]))} ({len(numbers)} steps)"
    return ", ".join(map(str, numbers))


def pickle_refused(path: str | Path = "") -> CheckpointError:
    """Return the error for a pickle: loading one runs the code in it."""
    return CheckpointError(
        Finding(
            "pickle-refused",
            "this is a pickle, and loading a pickle runs the code in it",
            path=str(path),
            fix=(
                "load it where the code that wrote it runs, and save the arrays without objects: "
                "numpy.savez(path, **flat_dict), flax.serialization.to_bytes or safetensors.flax.save_file"
            ),
        )
    )
