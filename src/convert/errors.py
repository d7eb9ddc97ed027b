"""Every error that a user can cause is one of these; the message says where, what on both sides, and the next step."""


class ConvertError(Exception):
    """Base of all errors that this package raises on purpose. The command line prints its text and exits with 2."""


class CheckpointError(ConvertError):
    """The checkpoint cannot be read: not one, unfinished, truncated, corrupt, or a choice is left open."""


class RuleError(ConvertError):
    """A rule file is not valid. The message starts with ``file:line:column``."""


class PlanError(ConvertError):
    """The rules and the checkpoint do not fit. Holds every finding, not only the first.

    Attributes:
        findings: one text per problem, each with rule file:line, tree path, both sides and the next step.
    """

    def __init__(self, message: str, findings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class UnavailableError(ConvertError):
    """A reference's model cannot be had here: a package is not installed, or a fact that it needs is not known."""


class OwnCodeError(ConvertError):
    """A function that the user named on the command line failed, or did not give what was asked of it.

    Attributes:
        said: what it raised, where, and the next step, in a line.
        frames: its calls down to there, the last one innermost: ``file:line, in function: source``.
    """

    def __init__(self, said: str, frames: tuple[str, ...] = ()) -> None:
        super().__init__("\n".join((said, *(f"  {frame}" for frame in frames))))
        self.said, self.frames = said, frames


class OutputError(ConvertError):
    """The output cannot be written: it exists, the disk is full, the name is not usable."""
