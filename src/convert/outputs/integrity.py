"""Check an output against the digests in its own headers: no source, no rules, bounded memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.safetensors_header import TensorEntry, read_header
from convert.core.system.regular_file import ObjectPath, open_regular, read_regular
from convert.stores import located
from convert.stores.errors import StoreError
from convert.writing import digests
from convert.writing.file_layout import INDICES, SHARD, SINGLE_FILES, SUFFIX
from convert.writing.model_card import CARD, without_figures
from convert.writing.transfer import default_jobs
from convert.writing.written import MAX_JSON

_BLOCK = 8 << 20
# Files that a loader may take in place of the weights, or together with them.
_LOADABLE = re.compile(
    r".*\.(safetensors|bin|ckpt|gguf|h5|msgpack|pt|pth)|.*\.index\.json|(generation_)?config\.json|adapter_config\.json"
)
PROVENANCE = ("converter", "model", "version", "target", "dtype", "rules_sha256", "source_format", "source_digest")


@dataclass(frozen=True)
class Integrity:
    """What `verify_output` found.

    Attributes:
        path: the output.
        files: number of files whose digests were compared.
        tensors, nbytes: number and bytes of the tensors that were read.
        provenance: what the headers say of the conversion.
        findings: everything that differs from what the conversion wrote; empty means intact.
        notes: what no digest covers.
    """

    path: Path
    files: int
    tensors: int
    nbytes: int
    provenance: Mapping[str, str]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def intact(self) -> bool:
        """Whether every digest agrees and no file is missing or added."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "out": str(self.path),
            "intact": self.intact,
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "provenance": dict(self.provenance),
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Header:
    """Header of one file of weights: what it says, and what is wrong with it."""

    file: Path
    metadata: Mapping[str, str]
    entries: Mapping[str, TensorEntry]
    tensors: Mapping[str, str]
    files: Mapping[str, str]
    findings: tuple[Finding, ...]
    has_digests: bool = True


def verify_output(out: Path, ignore: Iterable[str] = (), jobs: int | None = None) -> Integrity:
    """Compare every byte of an output with the digests that its conversion wrote into the headers.

    A header is covered by its own digest, each tensor by one, and each file beside the weights by one. Of the model card the
    figures of a check are not covered, which are added after the conversion.

    Args:
        out: a ``.safetensors`` file, or a directory; also the URL of one.
        ignore: names of files in the directory that may differ, be missing or be new.
        jobs: threads; None is the number of processors.

    Raises:
        CheckpointError: there is no such output, or none of its files has digests.
    """
    out = located(out)
    headers = [_read(file) for file in _weight_files(out)]
    if not any(header.has_digests or header.findings for header in headers):
        raise CheckpointError(
            Finding(
                "digests-missing",
                "its headers hold no digests: other code wrote it, or an older version",
                path=str(out),
                fix="convert again, or compare it with its checkpoint (`convert check OUT --from CKPT`)",
            )
        )
    findings = [finding for header in headers for finding in header.findings]
    readable = [header for header in headers if header.has_digests and header.entries]
    findings += [_without_digests(header.file) for header in headers if not header.has_digests and not header.findings]
    notes: list[str] = []
    if out.is_dir():
        ignored = set(ignore)
        findings += [*_mixed(readable), *_renamed(out, readable)]
        beside, notes = _beside(out, readable, {header.file.name for header in headers}, ignored)
        findings += beside
    with ThreadPoolExecutor(jobs or default_jobs()) as pool:
        tasks = [(header, name) for header in readable for name in header.entries]
        findings += [found for found in pool.map(lambda task: _tensor(*task), tasks) if found is not None]
    first = next(iter(readable), headers[0])
    return Integrity(
        out,
        len(readable) + len({name for header in readable for name in header.files if out.is_dir()}),
        len(tasks),
        sum(entry.stop - entry.start for header in readable for entry in header.entries.values()),
        provenance(first.metadata),
        tuple(findings),
        tuple(notes),
    )


def provenance(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return what the metadata of a header says of the conversion."""
    return {key: metadata[key] for key in PROVENANCE if metadata.get(key)}


def _weight_files(out: Path) -> list[Path]:
    """List the files that the conversion wrote tensors to, as far as they are there."""
    if not out.is_dir():
        if out.exists():
            return [out]
        raise _nothing(out, "there is no such file or directory")
    single = [out / name for name in SINGLE_FILES if (out / name).exists()]
    files = single or sorted(path for path in out.iterdir() if SHARD.fullmatch(path.name))
    return files or _any_weights(out)


def _any_weights(out: Path) -> list[Path]:
    files = sorted(out.glob(f"*{SUFFIX}"))
    if not files:
        raise _nothing(out, "there is no .safetensors file in it")
    return files


def _nothing(out: Path, problem: str) -> CheckpointError:
    return CheckpointError(Finding("converted-not-found", problem, path=str(out), fix="give the output of `convert`"))


def _damaged(file: Path, problem: str, fix: str = "convert again, or copy it again", **data: Any) -> Finding:
    return Finding("output-damaged", problem, path=str(file), fix=fix, data={"file": file.name, **data})


def _without_digests(file: Path) -> Finding:
    return _damaged(file, "its header holds no digests, in contrast to the other files: other code wrote it")


def _read(file: Path) -> _Header:
    """Read the header of a file of weights and check it."""
    try:
        metadata, entries = read_header(file)
        with open_regular(file) as opened:
            length = opened.read(8)
            header = length + opened.read(int.from_bytes(length, "little"))
    except CheckpointError as error:
        if (
            isinstance(file, ObjectPath) and error.code == "file-not-readable"
        ):  # a store that does not answer damages nothing
            raise
        return _Header(file, {}, {}, {}, {}, tuple(_damaged(file, str(f)) for f in error.findings))
    except StoreError:
        raise
    except OSError as error:
        return _Header(file, {}, {}, {}, {}, (_damaged(file, f"cannot be read: {error.strerror or error}"),))
    if not any(key in metadata for key in digests.KEYS):
        return _Header(file, metadata, entries, {}, {}, (), has_digests=False)
    tensors, files = (digests.names(metadata.get(key)) for key in (digests.TENSORS, digests.FILES))
    findings = (
        () if digests.is_sealed(header) else (_damaged(file, "the header differs from the one that was written"),)
    )
    if not findings and (tensors is None or files is None or tensors.keys() != entries.keys()):
        findings = (_damaged(file, "its header has no digest for some of its tensors"),)
    return _Header(file, metadata, entries, tensors or {}, files or {}, findings)


def _mixed(headers: list[_Header]) -> Iterator[Finding]:
    """Find files of another conversion: what the headers state in common must be the same."""

    def common(header: _Header) -> dict[str, str]:
        own = {digests.TENSORS, digests.HEADER}
        return {key: value for key, value in header.metadata.items() if key not in own}

    for header in headers[1:]:
        differing = sorted({key for key, _ in common(header).items() ^ common(headers[0]).items()})
        if differing:
            yield _damaged(
                header.file, f"belongs to another conversion than {headers[0].file.name}: other {', '.join(differing)}"
            )


def _renamed(out: Path, headers: list[_Header]) -> Iterator[Finding]:
    """Find exchanged files: a loader looks for a tensor in the file that the index names."""
    holders = _weight_map(out)
    for header in headers:
        other = next((name for name in header.entries if holders.get(name, header.file.name) != header.file.name), None)
        if other is not None:
            yield _damaged(header.file, f"holds {other}, which the index has in {holders[other]}: it was renamed")


def _weight_map(out: Path) -> dict[str, str]:
    """Read which file holds each tensor; empty without a readable index, whose digest then tells what is wrong."""
    index = next((out / name for name in INDICES if (out / name).is_file()), out / INDICES[0])
    try:
        return dict(json.loads(read_regular(index, MAX_JSON))["weight_map"].items())
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _beside(out: Path, headers: list[_Header], weights: set[str], ignored: set[str]) -> tuple[list[Finding], list[str]]:
    """Compare the files beside the weights, and the set of files."""
    recorded = {name: digest for header in headers for name, digest in header.files.items()}
    findings = []
    for name, digest in sorted(recorded.items()):
        if name in ignored or Path(name).name != name:
            continue
        try:
            content = read_regular(out / name, MAX_JSON)
        except FileNotFoundError:
            findings.append(_damaged(out / name, "is missing"))
            continue
        except StoreError:
            raise
        except OSError as error:
            findings.append(_damaged(out / name, f"cannot be read: {error.strerror or error}"))
            continue
        if digests.digest(_as_written(name, content)) != digest:
            fix = f"copy it again; if you changed it, give --ignore {name}"
            findings.append(_damaged(out / name, "differs from the file that was written", fix))
    expected = _shard_names(weights)
    findings += [
        _damaged(out / name, f"is missing{_tensors_in(out, name)}") for name in sorted(expected - weights - ignored)
    ]
    known = {*recorded, *expected, *ignored}
    extra = sorted(path.name for path in out.iterdir() if path.name not in known)
    loadable = [name for name in extra if _LOADABLE.fullmatch(name)]
    findings += [
        _damaged(out / name, "was not written by the conversion", f"remove it, or give --ignore {name}")
        for name in loadable
    ]
    others = [name for name in extra if name not in loadable]
    notes = [f"not covered, as the conversion did not write it: {name}" for name in others]
    return findings, notes


def _as_written(name: str, content: bytes) -> bytes:
    """Return a file without what `convert --check` adds to it afterwards."""
    if name != CARD:
        return content
    try:
        return without_figures(content.decode()).encode()
    except UnicodeDecodeError:
        return content


def _shard_names(present: set[str]) -> set[str]:
    """Return the names of all files of weights, of which some may be missing."""
    counts = {(int(found[3]), found[1]) for name in present if (found := SHARD.fullmatch(name))}
    if not counts:
        return present
    count, stem = max(counts)
    return {f"{stem}-{k:05d}-of-{count:05d}{SUFFIX}" for k in range(1, count + 1)}


def _tensors_in(out: Path, file: str) -> str:
    """Name a tensor that a missing file held, as the index says."""
    names = sorted(name for name, holder in _weight_map(out).items() if holder == file)
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return f" (it held {names[0]}{more})" if names else ""


def _tensor(header: _Header, name: str) -> Finding | None:
    """Compare the bytes of a tensor with its digest."""
    entry, expected = header.entries[name], header.tensors.get(name)
    if expected is None:  # `_read` has found it
        return None
    state = xxhash.xxh3_128()
    try:
        with open_regular(header.file) as file:
            for block in _blocks(file, entry.start, entry.stop):
                state.update(block)
    except StoreError:
        raise
    except OSError as error:
        return _damaged(header.file, f"{name} cannot be read: {error.strerror or error}", tensor=name)
    if state.hexdigest() == expected:
        return None
    problem = f"the bytes of {name} differ from those that were written"
    return _damaged(header.file, problem, tensor=name, expected=expected, got=state.hexdigest())


def _blocks(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    file.seek(start)
    while start < stop:
        block = file.read(min(_BLOCK, stop - start))
        if not block:
            raise OSError("it has become shorter")
        yield block
        start += len(block)
