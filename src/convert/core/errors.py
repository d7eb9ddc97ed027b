"""Every error that a user can cause. An error carries findings; its text is rendered from them."""

from __future__ import annotations

from convert.core.findings import Finding, group_similar
from convert.core.text import one_line


class ConvertError(Exception):
    """Base of all errors that this package raises on purpose. The command line prints its text and exits with 2.

    Attributes:
        findings: the problems as data, at least one; the first gives `code`.
        headline: one line above several findings; empty where the only finding says everything.
        lines: further lines below the findings.
    """

    def __init__(self, *findings: Finding, headline: str = "", lines: tuple[str, ...] = ()) -> None:
        self.findings = findings
        self.headline = one_line(headline)
        self.lines = tuple(map(one_line, lines))
        super().__init__(self.render())

    def render(self) -> str:
        """The text: the only finding, or the headline and a line for each finding."""
        if not self.headline:
            return "\n".join((*map(str, self.findings), *self.lines))
        return "\n".join((self.headline, *(f"  - {self._line(finding)}" for finding in self.findings), *self.lines))

    def _line(self, finding: Finding) -> str:
        """The text of one finding below a headline, with its code if the codes differ."""
        return finding.render(with_code=not self.shared_code)

    @property
    def shared_code(self) -> str:
        """Key of all findings in the error index; empty if they have different ones."""
        return self.code if len({finding.code for finding in self.findings}) == 1 else ""

    @property
    def code(self) -> str:
        """Key of the first finding in the error index."""
        return self.findings[0].code


MAX_LINES = 12  # lines of findings in the text of a `PlanError`; its `findings` holds all of them


class CheckpointError(ConvertError):
    """The checkpoint cannot be read: it is missing, unfinished, truncated or corrupt, or a choice is open."""


class RuleError(ConvertError):
    """A rule file is not valid. Each finding's `rule` is ``file:line:column``."""

    def __init__(self, *findings: Finding, headline: str = "") -> None:
        several = len(findings) > 1 and not headline
        super().__init__(*findings, headline=f"The rules have {len(findings)} problems:" if several else headline)


class PlanError(ConvertError):
    """The rules and the checkpoint do not fit. Holds every finding, not only the first.

    Attributes:
        hint: what else could be tried, such as another model of the same family; empty without one.
    """

    def __init__(self, *findings: Finding, headline: str = "", hint: str = "") -> None:
        self.hint = one_line(hint)
        super().__init__(*findings, headline=headline)

    def with_hint(self, hint: str) -> PlanError:
        """Return the same error with a hint."""
        return type(self)(*self.findings, headline=self.headline, hint=hint)

    def render(self) -> str:
        """The text: similar findings as one line, and at most `MAX_LINES` lines of findings."""
        if not self.headline:
            return "\n".join((*map(str, self.findings), *filter(None, (self.hint,))))
        groups = group_similar(self.findings)
        lines = [self._line(group[0]) + (f" ({len(group) - 1} more like it)" if group[1:] else "") for group in groups]
        rest = sum(len(group) for group in groups[MAX_LINES:])
        shown = [f"  - {line}" for line in lines[:MAX_LINES]] + ([f"  ... and {rest} more"] if rest else [])
        return "\n".join((self.headline, *shown, *filter(None, (self.hint,))))


class OptionError(PlanError):
    """An option does not suit the rules: an unknown target, dtype or setting, or a value that it cannot have."""


class UnavailableError(ConvertError):
    """A reference model cannot be built here: a package is missing, or a required fact is unknown."""


class UserCodeError(ConvertError):
    """A function that the user named on the command line raised an error, or returned a wrong value.

    Attributes:
        frames: the user's stack frames, the innermost last: ``file:line, in function: source``.
    """

    def __init__(self, finding: Finding, frames: tuple[str, ...] = ()) -> None:
        self.frames = frames
        super().__init__(finding)

    def render(self) -> str:
        return "\n".join((super().render(), *(f"  {frame}" for frame in self.frames)))


class OutputError(ConvertError):
    """The output cannot be written: it exists, the disk is full, or its name is not usable."""
