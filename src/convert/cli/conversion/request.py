"""What ``convert MODEL CKPT OUT`` was asked for, as one value; options that do not go together are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convert.cli import output
from convert.cli.options import JAX_FORMATS, refuse_layout, refuse_options_of_pytorch
from convert.core.errors import ConvertError
from convert.core.findings import Finding

if TYPE_CHECKING:
    from convert.checkpoints import Source
    from convert.planning.options import ConversionOptions
    from convert.verify.report.report import Report

PEFT = "peft"  # the value of --adapter that writes PEFT's form


@dataclass(frozen=True)
class Proof:
    """The check afterwards, of ``--check``."""

    reference: str | None
    require: tuple[str, ...]
    trust: tuple[str, ...]

    def report(self, model: str, tensors: Path, source: Source, options: ConversionOptions) -> Report:
        """Check tensors against the checkpoint that they belong to."""
        from convert.verify.run import check

        with output.prints_to_stderr():
            return check(
                tensors, source, options, model=model, require=self.require, trust=self.trust, reference=self.reference
            )


@dataclass(frozen=True)
class Writing:
    """How the output is written.

    Attributes:
        max_shard_size: as the user wrote it, such as ``5GB``.
        jobs: leaves converted at a time.
        engine: ``local`` or ``ray``.
        address: the head of a Ray cluster.
    """

    overwrite: bool
    resume: bool
    max_shard_size: str | None
    jobs: int | None
    engine: str
    address: str | None


@dataclass(frozen=True)
class Request:
    """One conversion.

    Attributes:
        options: those of the plan; `to` is None on the way back, and `like` is not read yet.
        to: a target of the rules, or one of `JAX_FORMATS`.
        like: a file or directory that ``--like`` names.
        layout: a published layout of the tree.
        attest: where the in-toto statement goes.
        push: a repository of the Hub.
        dry_run: whether the plan is printed and nothing is written.
        full: whether repeated layers are printed, too.
    """

    model: str
    checkpoint: Path
    out: Path
    options: ConversionOptions
    to: str | None
    adapter: str | None
    like: Path | None
    layout: str | None
    writing: Writing
    attest: Path | None
    push: str | None
    private: bool
    proof: Proof | None
    dry_run: bool
    full: bool
    quiet: bool
    as_json: bool

    @property
    def jax_format(self) -> str | None:
        """Format of the checkpoint of JAX code that PyTorch weights become; None where they do not."""
        return self.to if self.to in JAX_FORMATS else None

    @property
    def to_peft(self) -> bool:
        """Whether LoRA pairs become PEFT's adapter."""
        return self.adapter == PEFT and self.jax_format is None


def refuse(asked: Request) -> None:
    """Refuse options that do not go together, before anything is read.

    Raises:
        ConvertError: two of them do not.
    """
    if asked.proof is not None and asked.dry_run:
        raise ConvertError(Finding("usage", "--dry-run writes nothing that --check could check", fix="leave one out"))
    elsewhere = asked.jax_format is not None or asked.adapter == PEFT
    _refuse_push(asked, elsewhere)
    _refuse_engine(asked.writing, elsewhere)
    if asked.adapter is not None:
        _refuse_adapter(asked.adapter, asked)
    if asked.proof is not None:
        _refuse_proof(asked.proof)
    if asked.jax_format is not None:
        refuse_options_of_pytorch(
            asked.jax_format,
            {
                "--lora": asked.options.lora,
                "--max-shard-size": asked.writing.max_shard_size,
                "--resume": asked.writing.resume,
                "--attest": asked.attest,
                "--tokenizer": asked.options.tokenizer,
            },
        )
    else:
        refuse_layout(asked.layout)


def refuse_without_check(given: Mapping[str, object]) -> None:
    """Refuse options of the check where there is none.

    Raises:
        ConvertError: one of them was given.
    """
    for option, value in given.items():
        if value:
            problem = f"{option} is an option of the check"
            raise ConvertError(Finding("usage", problem, fix="add --check, or run `convert check` afterwards"))


def _refuse_push(asked: Request, elsewhere: bool) -> None:
    from convert.stores import StorePath, located

    if asked.push is None:
        if asked.private:
            raise ConvertError(Finding("usage", "--private is for a repository of --push", fix="leave it out, or add --push"))  # fmt: skip
        return
    on_disk = asked.out.suffix != ".safetensors" and not isinstance(located(asked.out), StorePath)
    unfit = {
        "--dry-run": asked.dry_run,
        "the way back and adapters": elsewhere,
        "an OUT that is no directory of this machine": not on_disk,
    }
    for option, given in unfit.items():
        if given:
            raise ConvertError(Finding("usage", f"--push does not go with {option}", fix="leave one out"))


def _refuse_engine(writing: Writing, elsewhere: bool) -> None:
    if writing.engine not in ("local", "ray"):
        raise ConvertError(Finding("usage", path="--engine", expected="local or ray", got=writing.engine))
    if writing.address is not None and writing.engine != "ray":
        raise ConvertError(Finding("usage", "--address is the head of a Ray cluster", fix="add --engine ray"))
    if writing.engine == "ray" and elsewhere:
        problem = "--engine ray writes safetensors for PyTorch only"
        raise ConvertError(Finding("usage", problem, fix="leave it out for adapters and the way back"))


def _refuse_proof(proof: Proof) -> None:
    from convert.core.user_code import REFERENCE_OPTION, find_factory
    from convert.verify.options import require_levels

    require_levels(proof.require)
    if proof.reference:
        with output.prints_to_stderr():
            find_factory(proof.reference, REFERENCE_OPTION)


def _refuse_adapter(adapter: str, asked: Request) -> None:
    if adapter not in (PEFT, "base") and asked.jax_format is None:  # the way back also has the forms of pairs
        raise ConvertError(Finding("usage", path=f"--adapter {adapter}", expected="peft or base", got=adapter, fix="leave it out to have the pairs merged"))  # fmt: skip
    if adapter != PEFT:
        return
    unused = {
        "--to": asked.jax_format,
        "--check": asked.proof,
        "--like": asked.like,
        "--max-shard-size": asked.writing.max_shard_size,
        "--jobs": asked.writing.jobs,
        "--tokenizer": asked.options.tokenizer,
    }
    for option, value in unused.items():
        if value:
            raise ConvertError(
                Finding("usage", f"{option} has no meaning with --adapter {adapter}", fix="leave one out")
            )
