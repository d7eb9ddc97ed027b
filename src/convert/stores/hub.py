"""A repository of the Hugging Face Hub: files are downloaded to the Hub's cache when they are first read, as its own library does.

The commit is resolved once, so that files of two commits are never mixed. The token is that of huggingface_hub (``HF_TOKEN``, or
``hf auth login``); ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` hold as everywhere.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from convert.stores.entry import Entry
from convert.stores.errors import StoreError, UnavailableError, gone, missing_extra, refusal, unavailable

_WAITS = 1, 2, 4  # seconds before a request is repeated
_TOKEN = "give a token that may do this with HF_TOKEN or hf auth login"


class Repository:
    """A repository at a revision. Its methods are those of a bucket that read."""

    scheme = "hf"

    def __init__(self, name: str) -> None:
        self.name = name
        self.id, _, revision = name.partition("@")
        self.revision = unquote(revision) or "main"
        self._lock = threading.Lock()
        self._listed: tuple[str, dict[str, Entry]] | None = None
        self._files: dict[str, Path] = {}

    @property
    def url(self) -> str:
        """Its URL."""
        return f"hf://{self.name}"

    def forget(self) -> None:
        """Forget what was listed."""
        with self._lock:
            self._listed = None
            self._files.clear()

    def find(self, key: str) -> Entry | None:
        """Return a file of the commit; None where it has none."""
        return self._commit()[1].get(key)

    head = find

    def is_directory(self, key: str) -> bool:
        """Whether files lie below a name."""
        below = f"{key}/" if key else ""
        return any(name.startswith(below) for name in self._commit()[1])

    def names(self, key: str) -> list[str]:
        """Return the names in a directory."""
        below = f"{key}/" if key else ""
        files = self._commit()[1]
        return sorted({name.removeprefix(below).partition("/")[0] for name in files if name.startswith(below)})

    def read(self, key: str, start: int, stop: int, entry: Entry) -> memoryview:
        """Return a range of bytes of a file, which is downloaded before if the cache lacks it.

        Raises:
            StoreError: the file changed since it was listed; or the Hub refused, or did not answer.
        """
        if self.find(key) != entry:
            raise gone(f"{self.url}/{key}", "has changed")
        with self._file(key).open("rb") as file:
            file.seek(start)
            content = file.read(stop - start)
        if len(content) != stop - start:
            raise StoreError(f"the file in the cache has not the {entry.size:,} bytes of the Hub's", f"{self.url}/{key}", "remove it from the cache")  # fmt: skip
        return memoryview(content)

    def kvstore(self, prefix: str) -> dict[str, Any]:
        """Download a directory, and return its TensorStore spec."""
        commit = self._commit()[0]
        got = self._asked(lambda hub: hub.snapshot_download(self.id, revision=self.revision, allow_patterns=f"{prefix}*"))  # fmt: skip
        return {"driver": "file", "path": f"{self._of(commit, got)}/{prefix}"}

    def _file(self, key: str) -> Path:
        commit = self._commit()[0]
        with self._lock:
            if key not in self._files:
                got = self._asked(lambda hub: hub.hf_hub_download(self.id, key, revision=self.revision), key)
                self._files[key] = self._of(commit, got)
            return self._files[key]

    def _of(self, commit: str, got: str) -> Path:
        """Check the commit of a download by the name of the revision, which the cache keeps for later."""
        if commit not in Path(got).parts:
            raise gone(self.url, "got a new commit")
        return Path(got)

    def _commit(self) -> tuple[str, dict[str, Entry]]:
        """Return the hash of the commit and its files."""
        with self._lock:
            if self._listed is None:
                self._listed = self._asked(self._from_cache if _offline(self.url) else self._from_hub)
            return self._listed

    def _from_hub(self, hub: Any) -> tuple[str, dict[str, Entry]]:
        commit = hub.repo_info(self.id, revision=self.revision).sha
        tree = hub.list_repo_tree(self.id, revision=commit, recursive=True)
        files = [file for file in tree if hasattr(file, "blob_id")]
        return commit, {file.path: Entry(file.size, file.lfs.sha256 if file.lfs else file.blob_id, 0) for file in files}

    def _from_cache(self, _: Any) -> tuple[str, dict[str, Entry]]:
        from huggingface_hub import constants, scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        try:
            cached = scan_cache_dir(constants.HF_HUB_CACHE).repos
        except CacheNotFound:
            cached = frozenset()
        for repository in cached:
            if repository.repo_type == "model" and repository.repo_id == self.id:
                for found in repository.revisions:
                    if self.revision in (found.commit_hash, *found.refs):
                        files = {file.file_path.relative_to(found.snapshot_path).as_posix(): file for file in found.files}  # fmt: skip
                        return found.commit_hash, {key: Entry(file.size_on_disk, file.blob_path.name, 0) for key, file in files.items()}  # fmt: skip
        problem = "HF_HUB_OFFLINE is set, and the cache has nothing of this revision"
        raise StoreError(problem, self.url, "download it before, or unset HF_HUB_OFFLINE")

    def _asked(self, ask: Callable[[Any], Any], key: str = "") -> Any:
        place = f"{self.url}/{key}" if key else self.url
        for wait in _WAITS:
            with suppress(UnavailableError), errors(place):
                return ask(api(place))
            time.sleep(wait)
        with errors(place):
            return ask(api(place))


def api(place: str) -> Any:
    """Return huggingface_hub's client.

    Raises:
        StoreError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise missing_extra("hf", "huggingface_hub", "hub", place) from None
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi(library_name="ckpt-convert")


def _offline(place: str) -> bool:
    _ = api(place)
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def errors(place: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one clear error, without its text, which may hold a URL with a signature.

    Raises:
        StoreError: the Hub refused, or did not answer.
        FileNotFoundError: the commit has no such file.
    """
    from huggingface_hub import errors as hub

    try:
        yield
    except StoreError:
        raise
    except hub.GatedRepoError:
        raise StoreError("the repository is gated, and this account has no access", place, f"ask for access on its page, and {_TOKEN}") from None  # fmt: skip
    except hub.RevisionNotFoundError:
        raise StoreError("there is no such branch, tag or commit", place, "correct the revision after the @") from None
    except hub.RepositoryNotFoundError:
        raise StoreError("there is no such repository, or this account does not see it", place, f"correct the name, or {_TOKEN}") from None  # fmt: skip
    except (hub.LocalEntryNotFoundError, RuntimeError) as error:  # of a file that could not be read, or sent
        raise _answered(error.__cause__, place) from None
    except hub.EntryNotFoundError:
        raise FileNotFoundError(place) from None
    except hub.HFValidationError:
        raise StoreError("this is no name of a repository", place, "give owner/name") from None
    except hub.HfHubHTTPError as error:
        raise _answered(error, place) from None
    except (hub.HTTPError, OSError) as error:  # type: ignore[attr-defined]  # of the HTTP library it uses
        raise _answered(error, place) from None


def _answered(error: BaseException | None, place: str) -> StoreError:
    response = getattr(error, "response", None)
    text = f"status {response.status_code}" if response is not None else type(error).__name__
    return refusal(text, place) or unavailable(text, place)
