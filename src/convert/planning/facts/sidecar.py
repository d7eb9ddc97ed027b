"""Read the sidecar of a checkpoint: the ``config.json`` next to it, or in its archive, which holds facts that no leaf holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from convert.checkpoints import Boundary, Source
from convert.checkpoints.formats.keras import config_in_archive
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.similarity import did_you_mean
from convert.core.system.regular_file import open_regular
from convert.planning.facts.gin import read_gin
from convert.planning.facts.left_out import NOT_COPIED, copied_keys, ignored_in_parts
from convert.planning.facts.settings import expected_fact
from convert.rules.allowed import Known
from convert.rules.file import RuleFile, SidecarConfig, parse_reference

MAX_BYTES = 1 << 20  # of a sidecar; real ones have a few kilobytes
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Sidecar:
    """The files next to a checkpoint.

    Attributes:
        config: contents of the file that the rules name; empty when there is none.
        exists: whether there is such a file.
        generation: contents of ``generation_config.json``; empty when there is none.
        ignored: what the file states, and the source's code does not read; not in `config`, but for keys of parts, ``encoder.is_causal``.
        copied: whether the output's ``config.json`` has the other keys, too.
        lines: key -> line of the file that states it, where the format has lines.
        left_out: keys that the file lacks, and that have the default of the source's code.
    """

    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    ignored: Mapping[str, Any] = field(default_factory=dict)
    copied: bool = True
    exists: bool = False
    lines: Mapping[str, int] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()

    @property
    def for_output(self) -> Mapping[str, Any]:
        """The keys that the output's ``config.json`` has, too: none where the file has the words of other code."""
        return copied_keys(self.config, self.ignored) if self.copied else {}


NO_SIDECAR = Sidecar({}, {})


def read_sidecar(rules: RuleFile, source: Source) -> Sidecar:
    """Read the files, if the rules use them and they exist.

    Raises:
        CheckpointError: one of them is damaged, too large, or a link out of the checkpoint.
    """
    if rules.sidecar is None:
        return NO_SIDECAR
    if rules.sidecar.is_gin:
        return _read_gin(rules.sidecar.file, source)
    found, ignored = read_beside(source, rules.sidecar.file), rules.sidecar.ignored
    stated = _opened_up(found or {}, rules.sidecar.below)
    defaults = {key: value for key, value in rules.sidecar.defaults.items() if stated and key not in stated}
    stated = {**stated, **defaults}
    return Sidecar(
        {key: value for key, value in stated.items() if key not in ignored},
        read_beside(source, GENERATION) or {},
        {**{key: value for key, value in stated.items() if key in ignored}, **dict(ignored_in_parts(stated, ignored))},
        not rules.sidecar.below,
        found is not None,
        left_out=frozenset(defaults),
    )


def _opened_up(content: Mapping[str, Any], below: Sequence[str]) -> Mapping[str, Any]:
    """Return the keys of a file with those below the keys `below`, one in the other; the inner value of a key counts."""
    stated, inner = dict(content), content
    for depth, key in enumerate(below):
        found = inner.get(key)
        if isinstance(found, dict):
            inner = found
            stated |= inner
        elif depth == 0:
            return {}  # of another code
    return stated


def _read_gin(name: str, source: Source) -> Sidecar:
    """Read a file of gin, whose words are those of other code: nothing of it is copied."""
    found = bytes_beside_or_above(source, name)
    if found is None:
        return Sidecar({}, {}, copied=False)
    bindings = read_gin(found[1].decode(errors="replace"))
    return Sidecar(bindings.values, {}, copied=False, exists=True, lines=bindings.lines)


def place_in_sidecar(rules: RuleFile, sidecar: Sidecar, key: str) -> str:
    """Return where the file states a key: ``config.json of the checkpoint``, with the line where there is one, or that it does not."""
    assert rules.sidecar is not None
    line = f":{sidecar.lines[key]}" if key in sidecar.lines else ""
    return f"{rules.sidecar.file}{line} of the checkpoint{', which leaves it out' if key in sidecar.left_out else ''}"


def folder_of(source: Source) -> Path:
    """Return the folder with the arrays."""
    return source.path if source.path.is_dir() else source.path.parent


def read_beside(source: Source, name: str, folder: Path | None = None) -> Mapping[str, Any] | None:
    """Read a JSON object next to the checkpoint; None where there is no such file.

    Args:
        folder: another one than that with the arrays: an item of an Orbax step lies in the folder of the step.

    Raises:
        CheckpointError: the file is damaged, too large, or a link out of the checkpoint.
    """
    found = bytes_beside(source, name, folder)
    if found is None:
        return None
    path, text = found
    try:
        content = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, "JSON", f"invalid JSON ({error})") from None
    if not isinstance(content, dict):
        raise _invalid(path, "a JSON object", type(content).__name__)
    return content


def bytes_beside(source: Source, name: str, folder: Path | None = None) -> tuple[Path, bytes] | None:
    """Read a file in the archive that the checkpoint is, or next to the checkpoint; None where there is no such file.

    Args:
        folder: as of `read_beside`.

    Raises:
        CheckpointError: the file cannot be read, is too large, or a link out of the checkpoint.
    """
    if folder is None and (enclosed := config_in_archive(source.path, name, MAX_BYTES)) is not None:
        return source.path / name, enclosed
    path = (folder or folder_of(source)) / name
    boundary = source.boundary or Boundary(source.path)
    (boundary.around(folder) if folder else boundary).check(path)
    try:
        with open_regular(path) as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            Finding("sidecar-invalid", f"cannot be read: {error.strerror}", path=str(path), fix="make it readable")
        ) from None
    if len(content) > MAX_BYTES:
        raise _invalid(path, f"at most {MAX_BYTES} bytes", "more")
    return path, content


def bytes_beside_or_above(source: Source, name: str) -> tuple[Path, bytes] | None:
    """Read a file next to the checkpoint, or in the folder above, where a training run keeps it beside its steps; None where there is none.

    Raises:
        CheckpointError: as `bytes_beside`.
    """
    return bytes_beside(source, name) or bytes_beside(source, name, folder_of(source).parent)


def _invalid(path: Path, expected: str, got: str) -> CheckpointError:
    fix = "correct the file, or move it elsewhere and use --set"
    return CheckpointError(Finding("sidecar-invalid", path=str(path), expected=expected, got=got, fix=fix))


def _no_number(word: str) -> None:
    """Reject NaN and Infinity, which Python reads although JSON has no such numbers."""
    raise ValueError(f"{word} is no number of JSON")


def sidecar_facts(rules: RuleFile, sidecar: Sidecar) -> dict[str, Any]:
    """Return the facts of the rules that the file holds under the same names."""
    return {
        key: value
        for key, value in sidecar.config.items()
        if key in rules.facts and (value is not None or _may_be_null(rules, key))
    }


def _may_be_null(rules: RuleFile, fact: str) -> bool:
    """Whether null is a value of a fact; a null of another one is one that the file does not state."""
    return fact in rules.allowed and None in rules.allowed[fact].others


def other_settings(rules: RuleFile, sidecar: Sidecar, settings: Mapping[str, Any]) -> Iterator[str]:
    """Note the settings that take the place of another value in the file."""
    for key, value in sidecar_facts(rules, sidecar).items():
        if key in settings and settings[key] != value:
            assert rules.sidecar is not None
            stated = f"{key} {json.dumps(value)} in the {place_in_sidecar(rules, sidecar, key)}"
            yield f"--set {key}={json.dumps(settings[key])} takes the place of {stated}; leave it out if the file is right"


def contradictions(
    rules: RuleFile,
    target: str,
    sidecar: Sidecar,
    sizes: Mapping[str, int],
    settings: Mapping[str, Any],
    of_layers: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Iterator[Finding]:
    """Compare the file with the values that the rules support and with the sizes of the tree.

    Args:
        of_layers: letter that varies -> its size in each layer.
    """
    if rules.sidecar is None:
        return
    for key, supported in rules.sidecar.supported.items():
        if key in sidecar.config and sidecar.config[key] not in supported and key not in settings:
            value = sidecar.config[key]
            near = did_you_mean(value, [str(word) for word in supported]) if isinstance(value, str) else ""
            yield Finding(
                "config-conflict",
                f"{key} in the {place_in_sidecar(rules, sidecar, key)}",
                rule=rules.sidecar.at,
                expected=f"{' or '.join(json.dumps(word) for word in supported)}",
                got=f"{json.dumps(value)}{f' ({near})' if near else ''}",
                fix="use the rules of another model; this model supports no other value",
            )
    yield from _invalid_facts(rules, sidecar, settings)
    yield from _invalid_keys(rules, sidecar.config, sizes)
    yield from _contradicted_by_the_tree(rules, target, sidecar)
    compared = [
        (key, text, f"{formula} = {size:g}")
        for key, formula, size in _sizes_of_the_tree(rules, target, sizes)
        for text, stated in _stated_sizes(sidecar, key)
        if stated != size
    ]
    for key, text, in_tree in (*compared, *_other_layers(rules.sidecar, sidecar, of_layers)):
        yield Finding(
            "config-conflict",
            f"the {place_in_sidecar(rules, sidecar, key)} has {text}, and the tree has {in_tree}",
            fix="one of the two is of another checkpoint",
        )


def _other_layers(
    declared: SidecarConfig, sidecar: Sidecar, of_layers: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, str, str]]:
    """Yield key, what the file says and what the tree has, of lists with the sizes of the first layers that are others in the tree."""
    for one in declared.sizes:
        stated, found = _stated(sidecar, one.letter), of_layers.get(one.text)
        if isinstance(stated, list) and found is not None and stated != [*found[: len(stated)]]:
            yield one.letter, f"{one.letter} = {stated}", f"{one.text} = {', '.join(map(str, found))}, layer by layer"


def _sizes_of_the_tree(rules: RuleFile, target: str, sizes: Mapping[str, int]) -> Iterator[tuple[str, str, float]]:
    """Yield key of the file, formula and size of each size that the file may state: in the target's words, or in its own."""
    assert rules.sidecar is not None
    for key, template in rules.targets[target].config.items():
        reference = parse_reference(template)
        if reference is not None and reference[0] in sizes:
            yield key, reference[0], sizes[reference[0]] + reference[1]
    for one in rules.sidecar.sizes:
        if sizes.keys() >= set(one.names):
            with suppress(ArithmeticError):  # a size of 0
                yield one.letter, one.text, one.value(sizes)


def _stated(sidecar: Sidecar, key: str) -> Any:
    """Return the value of a key; ``a.b`` is the key b in the mapping a, where the file has no key of this name."""
    if key in sidecar.config:
        return sidecar.config[key]
    above, _, below = key.partition(".")
    inner = sidecar.config.get(above)
    return inner.get(below) if isinstance(inner, dict) else None


def _stated_sizes(sidecar: Sidecar, key: str) -> Iterator[tuple[str, float]]:
    """Yield what the file says about a size, as text and number; transformers counts classes by their names, too."""
    value = _stated(sidecar, key)
    if isinstance(value, list) and len(value) == 1:  # the shape of a vector
        (value,) = value
    if isinstance(value, int | float):
        yield f"{key} = {value}", value
    for names in ("id2label", "label2id") if key == "num_labels" else ():
        if isinstance(value := sidecar.config.get(names), dict):
            yield f"num_labels = {len(value)} (the entries of {names})", len(value)


def _invalid_facts(rules: RuleFile, sidecar: Sidecar, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Refuse the values that --set refuses; and null for a number, with which the source's code does not compute."""
    assert rules.sidecar is not None
    for key in (key for key in rules.facts if key in sidecar.config):
        value = sidecar.config[key]
        nullable = isinstance(rules.facts[key], str) or _may_be_null(rules, key)
        if key in settings or key in rules.sidecar.supported or (value is None and nullable):
            continue
        if expected := expected_fact(rules, key, value):
            fix = f"correct the file, or give the value that the source computes with: --set {key}=..."
            yield _refused(rules.sidecar, key, value, expected, fix, place_in_sidecar(rules, sidecar, key))


def _refused(declared: SidecarConfig, key: str, value: Any, expected: str, fix: str, place: str = "") -> Finding:
    """Report the value of a key that no model has."""
    problem = f"{key} in the {place or f'{declared.file} of the checkpoint'}"
    return Finding("config-conflict", problem, rule=declared.at, expected=expected, got=json.dumps(value), fix=fix)


def _invalid_keys(
    rules: RuleFile, config: Mapping[str, Any], sizes: Mapping[str, int], above: str = ""
) -> Iterator[Finding]:
    """Refuse values that no model can have of keys that are no facts: the class of the output stops at them, or computes something else."""
    assert rules.sidecar is not None
    lengths = {key: len(value) for key, value in config.items() if isinstance(value, list)}  # for formulas
    absent = {index: 0 for rule in rules.rules if rule.sources for index in rule.path.indices if index not in sizes}
    known = Known(
        {**absent, **config, **lengths, **sizes}, {letter: axis.meaning for letter, axis in rules.axes.items()}
    )
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _invalid_keys(rules, value, sizes, f"{above}{key}.")
        elif key in rules.sidecar.allowed and (expected := rules.sidecar.allowed[key].refuses(value, known)):
            yield _refused(rules.sidecar, f"{above}{key}", value, expected, "correct the file: no model has this value")


def _contradicted_by_the_tree(rules: RuleFile, target: str, sidecar: Sidecar) -> Iterator[Finding]:
    """Refuse a key of the file that states something else than the output's, which is the same for every such tree.

    Whether the head is tied is one of them: the tree has a head of its own, or has none.
    """
    assert rules.sidecar is not None
    known = {*rules.sidecar.supported, *rules.sidecar.adapted, *NOT_COPIED}
    for key, value in rules.targets[target].config.items():
        stated = sidecar.config.get(key)
        if (
            key in known
            or stated is None
            or isinstance(value, dict | list)
            or parse_reference(value)
            or stated == value
        ):
            continue
        yield Finding(
            "config-conflict",
            f"{key} in the {rules.sidecar.file} of the checkpoint contradicts the tree",
            rule=rules.sidecar.at,
            expected=f"{json.dumps(value)}, as in a {' or '.join(_names(rules, target)) or rules.model} with this tree",
            got=json.dumps(stated),
            fix=f"one of the two is of another checkpoint; if the leaves are right, correct {key} in {rules.sidecar.file}",
        )


def _names(rules: RuleFile, target: str) -> list[str]:
    classes = rules.targets[target].config.get("architectures")
    return classes if isinstance(classes, list) else []


def other_values(rules: RuleFile, target: str, sidecar: Sidecar, known: Mapping[str, Any]) -> Iterator[str]:
    """Note the keys of the file whose value the output has in another form, because the source's code computes something else.

    Args:
        known: facts, and sizes of letters.
    """
    if rules.sidecar is None:
        return
    written = dict(_last_parts(rules.targets[target].config, known))
    reasons = {**rules.sidecar.adapted, **rules.sidecar.ignored}
    stated = {**sidecar.config, **sidecar.ignored}
    for path in dict.fromkeys((*reasons, *sidecar.ignored)):  # those of parts, too
        value, own = stated.get(path), written.get(path)
        if value is None or (type(value) is not dict and value == own):
            continue
        output = "none" if own is None else json.dumps(own)
        reason = reasons.get(path) or reasons[path.rpartition(".")[2]]
        yield f"{rules.sidecar.file} of the checkpoint has {path} {json.dumps(value)}, and that of the output {output}: {reason}"


def _last_parts(templates: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the last part of each key with its value; those of facts that are unknown are missing."""
    for key, template in templates.items():
        if isinstance(template, dict):
            yield from _last_parts(template, known)
        elif (reference := parse_reference(template)) is None:
            yield key, template
        elif isinstance(value := known.get(reference[0]), int | float | str):
            yield key, value + reference[1] if reference[1] and not isinstance(value, str) else value


def merge_config(sidecar: Sidecar, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` of the output: the keys of the rules, and the keys of the sidecar that the rules do not set."""
    return {**sidecar.for_output, **config}
