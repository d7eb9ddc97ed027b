"""Read the tokenizer, processor, generation and licence files of a directory (`--tokenizer`)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.checkpoints.access import Boundary
from convert.core.errors import OptionError
from convert.core.findings import Finding
from convert.core.option_text import set_option
from convert.core.system.regular_file import read_regular
from convert.planning.tokenizer.contents import image_side, last_id
from convert.stores import located

MAX_BYTES = (
    64 << 20
)  # of a file: `convert verify` reads no more of one beside the weights; Gemma 3's tokenizer.json has 33 MB
GENERATION, CARD = "generation_config.json", "README.md"
# transformers 5.23: `vocab_files_names` of its tokenizers, and the names in utils/__init__.py and tokenization_utils_base.py.
_PROCESSOR = re.compile(
    r"(pre|video_pre)?processor_config\.json|chat_template\.(jinja|json)|audio_tokenizer_config\.json"
)
_TOKENIZER = re.compile(
    r"tokenizer(_config|_vocab)?\.json|tokenizer\.model(\.v\d+)?|tekken\.json|special_tokens_map\.json|added_tokens\.json"
    r"|(spiece|spm|spm_char|sentencepiece|sentencepiece\.bpe)\.model|(source|target)\.spm|(entity_|target_)?vocab(-src|-tgt)?\.json"
    r"|vocab\.txt|merges\.txt|bpe\.codes|dict\.txt|emoji\.json|normalizer\.json|.+\.tiktoken"
)
# Of these the files with the tokens; the others are settings, or belong to one of them.
_VOCABULARY = re.compile(
    r"tokenizer(_vocab)?\.json|tokenizer\.model(\.v\d+)?|tekken\.json|(spiece|spm|spm_char|sentencepiece|sentencepiece\.bpe)\.model"
    r"|(source|target)\.spm|(target_)?vocab(-src|-tgt)?\.json|vocab\.txt|.+\.tiktoken"
)
EXPECTED = "tokenizer.json, tokenizer.model, spiece.model, sentencepiece.bpe.model, source.spm, vocab.json, vocab.txt, tekken.json or *.tiktoken"
_SETTINGS = "tokenizer_config.json"
_OF_BYTES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")  # the classes that read no file
_FIX = "give the directory of the published PyTorch model, or what `save_pretrained` of the tokenizer wrote"
_LICENCE = re.compile(
    r"((third.party.)?notices?|licen[cs]e|copying|(usage|use).policy)([-_.].*)?(\.(txt|md|rst))?", re.IGNORECASE
)
_STATED = re.compile(r"^(license(?:_name|_link)?):[ \t]*(\S.{0,199})$", re.MULTILINE)


@dataclass(frozen=True)
class TokenizerFiles:
    """What is copied beside the weights.

    Attributes:
        folder: as the user gave it.
        files: name -> contents, sorted by name; without ``generation_config.json``.
        generation: contents of ``generation_config.json``; None without one.
        licence: what the folder's model card states, such as ``license: gemma``.
        last_id: file with the tokens, and the largest id of one; None: it is not read, or there is none.
        image_side: file of the image processor, and the side of its square images; None: there is none, or they have other sizes.
    """

    folder: str
    files: Mapping[str, bytes]
    generation: Mapping[str, Any] | None
    licence: str
    last_id: tuple[str, int] | None = None
    image_side: tuple[str, int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all files."""
        return tuple(sorted({*self.files, *([GENERATION] if self.generation is not None else [])}))

    @property
    def has_vocabulary(self) -> bool:
        """Whether it has the tokens, or settings of a tokenizer that needs none."""
        if any(_VOCABULARY.fullmatch(name) for name in self.files):
            return True
        settings = json.loads(self.files.get(_SETTINGS, b"{}"))
        return isinstance(settings, dict) and settings.get("tokenizer_class") in _OF_BYTES

    @property
    def has_processor(self) -> bool:
        """Whether it has what a processor is built of."""
        return any(name.endswith("processor_config.json") for name in self.files)

    @property
    def digest(self) -> str:
        """SHA-256 of the names and contents."""
        content = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        return hashlib.sha256(json.dumps([content, self.generation], sort_keys=True).encode()).hexdigest()


def of_tokenizer(name: str) -> bool:
    """Whether a file of this name is of a tokenizer or a processor."""
    return _TOKENIZER.fullmatch(name) is not None or _PROCESSOR.fullmatch(name) is not None


def read_tokenizer(given: str | Path, follow_links: bool = False, *, text: bool = False) -> TokenizerFiles:
    """Read the files of a directory that a tokenizer, a processor or ``generate()`` needs, and those with the licence.

    Args:
        given: a directory of this machine, or its URL.
        follow_links: whether links in it may lead out of it.
        text: whether the model reads text, so that a processor alone is not enough.

    Raises:
        OptionError: it is no directory, has no such file or no vocabulary, or one of them cannot be read or is no JSON.
        CheckpointError: one of them is a link out of the directory.
    """
    folder = located(given)
    if not folder.is_dir():
        raise OptionError(
            Finding("tokenizer-not-found", "there is no such directory", path=str(folder), fix="correct --tokenizer")
        )
    boundary = Boundary(folder, follow_links)
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    copied = [name for name in names if of_tokenizer(name)]
    if not copied:
        raise OptionError(
            Finding(
                "tokenizer-not-found",
                "it has no file of a tokenizer or a processor",
                path=str(folder),
                expected="tokenizer.json, tokenizer.model, vocab.txt, preprocessor_config.json or another of their names",
                got=", ".join(names[:5]) or "no file",
                fix=_FIX,
            )
        )
    copied += [name for name in names if _LICENCE.fullmatch(name)]

    def read(name: str) -> bytes:
        boundary.check(folder / name)
        try:
            return read_regular(folder / name, MAX_BYTES)
        except OSError as error:
            problem = f"cannot be read: {error.strerror or error}"
            raise OptionError(
                Finding("file-not-readable", problem, path=str(folder / name), fix="make it readable")
            ) from None

    generation = _json_object(folder / GENERATION, read(GENERATION)) if GENERATION in names else None
    card = read(CARD).decode(errors="replace") if CARD in names else ""
    files = {name: read(name) for name in sorted(copied)}
    values = {name: _json_value(folder / name, of) for name, of in files.items() if name.endswith(".json")}
    last, side = last_id(values, files.get("vocab.txt")), image_side(values)
    found = TokenizerFiles(str(folder), files, generation, _stated_licence(card), last, side)
    if not found.has_vocabulary and (text or any(_TOKENIZER.fullmatch(name) for name in copied)):
        raise OptionError(
            Finding(
                "tokenizer-not-found",
                "it has no vocabulary",
                path=str(folder),
                expected=f"{EXPECTED}, or settings of a tokenizer of bytes ({', '.join(_OF_BYTES)})",
                got=", ".join(files),
                fix=_FIX,
            )
        )
    return found


def merged_generation(
    planned: Mapping[str, Any] | None, given: TokenizerFiles, *configs: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Return the output's ``generation_config.json``: what the plan has, and the other keys of the given one.

    Args:
        planned: contents of the plan's own file; None without one.
        given: the files of ``--tokenizer``.
        configs: ``config.json`` of the output and of the checkpoint. Without a file of their own, the ids of tokens stand there.

    Raises:
        OptionError: both have a key, with two values.
    """
    ours, theirs = planned or {}, given.generation or {}
    stated = {key: value for config in reversed(configs) for key, value in _token_ids(config).items()}
    other = {key: value for key, value in ours.items() if key in theirs and _as_list(theirs[key]) != _as_list(value)}
    other |= {
        key: value
        for key, value in stated.items()
        if key not in ours
        and theirs.get(key) is not None
        and any(one not in _as_list(theirs[key]) for one in _as_list(value))
    }
    findings = [
        Finding(
            "config-conflict",
            f"{key} in the {GENERATION} of --tokenizer",
            path=given.folder,
            expected=f"{json.dumps(value)}, as the rules or the files next to the checkpoint state",
            got=json.dumps(theirs[key]),
            fix=f"correct one of them; a fact of the rules is set with {set_option(key, theirs[key])}",
        )
        for key, value in other.items()
    ]
    if findings:
        raise OptionError(*findings)
    if planned is None and given.generation is None:
        return None
    return {**{key: value for key, value in theirs.items() if key != "transformers_version"}, **ours}


def _token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of tokens that a ``config.json`` states, and those of the part that writes text where it states none."""
    found: dict[str, Any] = {}
    for part in (config.get("text_config"), config.get("decoder"), config):
        if isinstance(part, Mapping):
            found |= {key: value for key, value in part.items() if key.endswith("_token_id") and value is not None}
    return found


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _json_object(path: Path, content: bytes) -> Mapping[str, Any]:
    found = _json_value(path, content)
    if not isinstance(found, dict):
        raise _not_json(path, "a JSON object")
    return found


def _json_value(path: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise _not_json(path, "JSON") from None


def _not_json(path: Path, expected: str) -> OptionError:
    fix = "correct the file, or copy it again from where it was published"
    return OptionError(Finding("sidecar-invalid", path=str(path), expected=expected, got="other content", fix=fix))


def _stated_licence(card: str) -> str:
    """Return what the front matter of a model card says of the licence."""
    if not card.startswith("---\n"):
        return ""
    front = card[4:].partition("\n---")[0]
    return ", ".join(f"{key}: {value.strip()}" for key, value in _STATED.findall(front))
