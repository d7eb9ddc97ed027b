"""Upload an output to a repository of the Hugging Face Hub: file by file, and visible with one commit at the end.

A large file goes to the store of the Hub, where nothing shows it before a commit names it. A run that ends before leaves the
repository as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from convert.stores.errors import StoreError
from convert.stores.hub import api, errors


@dataclass(frozen=True)
class Target:
    """A branch of a repository.

    Attributes:
        id: owner and name.
        revision: the branch.
        parent: the hash of its last commit; empty where there is no repository yet.
    """

    id: str
    revision: str
    parent: str

    @property
    def url(self) -> str:
        """Its URL, for messages."""
        return f"hf://{self.id}" + (f"@{self.revision}" if self.revision != "main" else "")


def find_target(name: str) -> Target:
    """Find a repository that will be written, and whether there is a token for it.

    Args:
        name: ``owner/name``, or ``owner/name@branch``.

    Raises:
        StoreError: there is no token, no such branch, or the Hub refused.
    """
    repository, _, revision = name.removeprefix("hf://").partition("@")
    target = Target(repository, unquote(revision) or "main", "")
    if repository.count("/") != 1:
        raise StoreError("this is no name of a repository", name, "give owner/name")
    hub = api(target.url)
    from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

    with errors(target.url):
        try:
            hub.whoami()
        except LocalTokenNotFoundError:
            raise StoreError("there is no token", target.url, "set HF_TOKEN, or run hf auth login") from None
        try:
            return Target(target.id, target.revision, hub.repo_info(target.id, revision=target.revision).sha)
        except RepositoryNotFoundError:
            if target.revision != "main":
                raise
            return target


def push(folder: Path, target: Target, private: bool, replaced: Callable[[str], bool]) -> Iterator[str]:
    """Upload a directory; yield the name of each file that is uploaded, and then the URL of the commit.

    Args:
        folder: the output.
        target: of `find_target`.
        private: whether a new repository is private.
        replaced: says of the name of a file in the repository whether it belongs to an older model, and goes with this commit.

    Raises:
        StoreError: the Hub refused, or did not answer; or the branch has got another commit meanwhile.
    """
    hub = api(target.url)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    with errors(target.url):
        parent = target.parent
        if not parent:
            hub.create_repo(target.id, private=private or None)
            parent = hub.repo_info(target.id).sha
        files = {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}
        operations = [CommitOperationAdd(name, str(file)) for name, file in files.items()]
        for operation in operations:
            hub.preupload_lfs_files(target.id, [operation], revision=target.revision)
            yield operation.path_in_repo
        present = hub.list_repo_files(target.id, revision=parent)
        old = [CommitOperationDelete(name) for name in present if name not in files and replaced(name)]
        message = "Upload converted weights"
        commit = hub.create_commit(target.id, [*operations, *old], commit_message=message, revision=target.revision, parent_commit=parent)  # fmt: skip
        yield str(commit.commit_url)
