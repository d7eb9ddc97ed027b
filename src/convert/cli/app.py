"""Put the commands together; turn errors into a message and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from convert.cli import INTERRUPTED, output
from convert.cli.check import check
from convert.cli.conversion.command import convert
from convert.cli.help import Command, Group
from convert.cli.infer import infer
from convert.cli.inspect import inspect
from convert.cli.pipeline.batch import batch
from convert.cli.pipeline.diff import diff
from convert.cli.pipeline.verify import verify
from convert.cli.plan import plan
from convert.cli.record import record
from convert.cli.rules import rules
from convert.cli.skeleton import skeleton
from convert.core.findings import Finding
from convert.core.system import signals

DEFAULT = "run"  # the command that `convert MODEL CKPT OUT` stands for


class DefaultCommandGroup(Group):
    """Read ``convert MODEL CKPT OUT`` as ``convert run MODEL CKPT OUT``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {name for param in self.get_params(ctx) for name in param.opts}
        if args and args[0] not in self.commands and args[0] not in own:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete models beside the commands, as ``convert MODEL`` needs no command."""
        model = self.commands[DEFAULT].params[0]
        return [*super().shell_complete(ctx, incomplete), *model.shell_complete(ctx, incomplete)]


app = typer.Typer(
    name="convert",
    cls=DefaultCommandGroup,
    subcommand_metavar="MODEL CKPT OUT | COMMAND ...",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Options of the conversion itself: convert run --help. "
    "Exit codes: 0 done or equal, 1 different, 2 error or inconclusive, 130 interrupted (Ctrl-C), 143 terminated.",
)
app.command(DEFAULT, cls=Command, epilog="Example: convert gemma ckpt/ out-dir/ --dtype bfloat16")(convert)
app.command(cls=Command, epilog="Example: convert inspect ckpt/ --full")(inspect)
app.command(cls=Command, epilog="Example: convert plan timesfm ckpt/ --to transformers")(plan)
app.command(cls=Command, epilog="Example: convert check out.safetensors --from ckpt/ --require model")(check)
app.command(cls=Command, epilog="Example: convert batch gemma 'ckpts/*' out/ --check weights --keep-going")(batch)
app.command(cls=Command, epilog="Example: convert verify out-dir/ --ignore README.md")(verify)
app.command(cls=Command, epilog="Example: convert diff old.safetensors new.safetensors")(diff)
app.command(cls=Command, epilog="Example: convert record timesfm ckpt/ recording.safetensors")(record)
app.command(cls=Command, epilog="Example: convert infer ckpt/ mine.yaml --reference pair:pair")(infer)
app.command(cls=Command, epilog="Example: convert skeleton my_model:make > skeleton.json")(skeleton)
app.add_typer(rules, name="rules")


def _print_version(wanted: bool) -> None:
    if wanted:
        from convert.writing.provenance import tool_version

        output.data(tool_version())
        raise typer.Exit()


@app.callback(no_args_is_help=True)
def convert_checkpoints(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Convert JAX checkpoints to PyTorch safetensors with declarative per-layer rules, and prove that both models compute the same.

    [bold]Examples[/bold]

      convert timesfm ckpt/ out.safetensors [dim]# a published model[/dim]

      convert check out.safetensors --from ckpt/ [dim]# the proof[/dim]

      convert inspect ckpt/ [dim]# the tree and the rules that fit[/dim]

      convert infer ckpt/ mine.yaml --reference pair:pair [dim]# rules for your own model[/dim]

    OUT is one file when it ends in .safetensors, a directory otherwise. Data goes to stdout, everything else to stderr.
    """


def main() -> NoReturn:
    """Run the command within another program; ends with `SystemExit`."""
    sys.exit(run())


def run() -> int:
    """Run the command and return its exit code."""
    from convert.core.errors import ConvertError
    from convert.core.user_code import exit_of_user_code

    try:
        code = app(standalone_mode=False) or 0
    except ConvertError as error:
        output.error(error.shared_code, str(error))
        return 2
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        fix = f"see `{context.command_path} --help`" if context is not None else ""
        output.error("usage", str(Finding("usage", problem=error.format_message().rstrip("."), fix=fix)))
        return 2
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SystemExit as stop:
        if (failed := exit_of_user_code(stop)) is not None:
            output.error(failed.shared_code, str(failed))
            return 2
        if isinstance(stop.code, str):
            output.error("usage", stop.code)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:  # noqa: BLE001 - the last resort: report the bug with the documented exit code
        if (failed := exit_of_user_code(error)) is not None:
            output.error(failed.shared_code, str(failed))
        elif (finding := _system_error(error)) is not None:
            output.error(finding.code, str(finding))
        else:
            import traceback

            output.error("internal", f"internal error, please report it:\n{traceback.format_exc()}")
        return 2
    if code == INTERRUPTED:  # Typer turns Ctrl-C into this exit code
        output.error("interrupted", f"interrupted; {signals.rest}")
    return int(code)


def _system_error(error: BaseException) -> Finding | None:
    """Explain an error of the operating system that no other code has; None: it is a bug of this program."""
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":  # CPython; it has no number
        return Finding(
            "thread-not-started",
            expected="a new thread",
            got="the limit of the system for threads or memory",
            fix="use fewer with --jobs 1, or allow more (`ulimit -u`)",
        )
    if not isinstance(error, OSError):
        return None
    if error.filename:  # any call may fail, for example on a network file system
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
        problem, fix = f"cannot be read: {error.strerror}", "check its permissions and the disk"
        return Finding("file-not-readable", problem, path=place, fix=fix)
    if error.errno in (errno.ENOSPC, errno.EPIPE, errno.EIO):  # Typer prints the help itself
        return Finding("output-not-writable", f"{error.strerror}", path="stdout")
    if error.errno in (None, errno.EBADF, errno.EFAULT, errno.EINVAL):  # what a program does wrong
        return None
    problem = f"a file cannot be read or written: {error.strerror}"
    return Finding("file-not-readable", problem, fix="check the disk and the limits of the system (`ulimit -a`)")
