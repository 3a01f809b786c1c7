"""HubCache: the models of the hub on this disk, in the directories that huggingface_hub's cache has.

Called by downloads and by `quire list` and `quire rm`. Other programs read and write the same directories:

    models--org--name/refs/main               the commit that a branch was at
                     /snapshots/COMMIT/FILE   a link to the file's contents
                     /blobs/HASH              contents, by SHA-256 (large files) or as git names them
                     /blobs/HASH.incomplete   what has come of them so far

Owns nothing but its root; every call looks at the disk.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.errors import ModelError

PREFIX = "models--"
PARTIAL = ".incomplete"
COMMIT = re.compile(r"[0-9a-f]{40}")
BLOB = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A repository in the cache.

    Attributes:
        repo: "org/name".
        refs: branch or tag -> commit.
        files: commit -> names of its files.
        num_bytes: of all contents on the disk.
        partial_bytes: of files that have not come completely.
        modified_s: when contents were last added, in seconds since 1970.
    """

    repo: str
    refs: dict[str, str]
    files: dict[str, tuple[str, ...]] = field(default_factory=dict)
    num_bytes: int = 0
    partial_bytes: int = 0
    modified_s: float = 0.0


class HubCache:
    """The cache at `root`, which need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def models(self) -> list[CachedModel]:
        """Every model repository, by name."""
        if not self.root.is_dir():
            return []
        names = sorted(path.name for path in self.root.iterdir() if path.name.startswith(PREFIX) and path.is_dir())
        return [self.model(name.removeprefix(PREFIX).replace("--", "/")) for name in names]

    def model(self, repo: str) -> CachedModel:
        """What is there of a repository; empty when it is not."""
        directory = self.directory(repo)
        commits = [path for path in _entries(directory / "snapshots") if path.is_dir()]
        blobs = [(path, path.stat()) for path in _entries(directory / "blobs") if path.is_file()]
        return CachedModel(
            repo=repo,
            refs=dict(self._refs(directory / "refs")),
            files={path.name: tuple(sorted(_files(path))) for path in commits},
            num_bytes=sum(stat.st_size for _, stat in blobs) + sum(map(_bytes_of_copies, commits)),
            partial_bytes=sum(stat.st_size for path, stat in blobs if path.name.endswith(PARTIAL)),
            modified_s=max((stat.st_mtime for _, stat in blobs), default=0.0),
        )

    def commit(self, repo: str, revision: str) -> str | None:
        """The commit that `revision` was at when it was last downloaded; None = it never was."""
        if COMMIT.fullmatch(revision):
            return revision if self.snapshot(repo, revision).is_dir() else None
        path = self._ref(repo, revision)
        try:
            commit = path.read_text().strip()
        except OSError:
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def files(self, repo: str, commit: str) -> list[str]:
        """Names of a commit's files whose contents are there."""
        return list(_files(self.snapshot(repo, commit)))

    def directory(self, repo: str) -> Path:
        """Of a repository."""
        return self.root / (PREFIX + repo.replace("/", "--"))

    def snapshot(self, repo: str, commit: str) -> Path:
        """The directory of a commit's files."""
        return self.directory(repo) / "snapshots" / commit

    def blob(self, repo: str, digest: str) -> Path:
        """Where contents are kept; a partial download is next to it."""
        assert BLOB.fullmatch(digest), "digests are checked where they come in"
        return self.directory(repo) / "blobs" / digest

    def link(self, repo: str, commit: str, name: str, digest: str) -> None:
        """Let file `name` of a commit show the contents `digest`; where links cannot be made, a copy."""
        path, blob = self.snapshot(repo, commit) / name, self.blob(repo, digest)
        if path.exists() and path.resolve() == blob.resolve():
            return  # others may be reading it
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:
            shutil.copyfile(blob, path)

    def set_ref(self, repo: str, revision: str, commit: str) -> None:
        """Note that `revision` is at `commit`."""
        if revision != commit and self.commit(repo, revision) != commit:
            path = self._ref(repo, revision)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit)

    def remove(self, repo: str) -> int:
        """Delete a repository; returns the bytes that it took."""
        num_bytes = self.model(repo).num_bytes
        shutil.rmtree(self.directory(repo))
        shutil.rmtree(self.root / ".locks" / self.directory(repo).name, ignore_errors=True)
        return num_bytes

    def remove_files(self, repo: str, names: Sequence[str]) -> int:
        """Delete files of all commits, and contents that no other file shows; returns the bytes that these took."""
        freed = 0
        for commit in self.model(repo).files:
            for name in names:
                path = self.snapshot(repo, commit) / name
                freed += 0 if path.is_symlink() or not path.is_file() else path.stat().st_size
                path.unlink(missing_ok=True)
        shown = {path.resolve() for path in (self.directory(repo) / "snapshots").rglob("*") if path.is_symlink()}
        for blob in _entries(self.directory(repo) / "blobs"):
            if blob.resolve() not in shown and not blob.name.endswith(PARTIAL):
                freed += blob.stat().st_size
                blob.unlink()
        return freed

    def _ref(self, repo: str, revision: str) -> Path:
        if not re.fullmatch(r"[\w.\-]+(/[\w.\-]+)*", revision) or ".." in revision:
            raise ModelError(
                f"revision {revision[:80]!r} is not a branch, a tag or a commit", hint="leave it out for main",
                field="revision",
            )  # fmt: skip
        return self.directory(repo) / "refs" / revision

    @staticmethod
    def _refs(directory: Path) -> Iterator[tuple[str, str]]:
        for name in _files(directory):
            commit = (directory / name).read_text(errors="replace").strip()
            if COMMIT.fullmatch(commit):
                yield name, commit


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _files(directory: Path) -> Iterator[str]:
    """Names of the files below a directory, with those of its directories; links whose target is gone are left out."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            yield path.relative_to(directory).as_posix()


def _bytes_of_copies(snapshot: Path) -> int:
    """Of files that are no links, as where links cannot be made."""
    return sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file() and not path.is_symlink())
