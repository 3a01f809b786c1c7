"""FileTransfer: one file from the hub to the cache, continued where an earlier attempt ended, and verified.

Made by `hub_download`, in a thread for each. Owns the partial file, which it locks, while it runs; one that is left
behind is continued by the next transfer of the same contents.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from quire.errors import HubUnreachableError, ModelError, NotEnoughDiskError, QuireError
from quire.models.hub_cache import PARTIAL, HubCache
from quire.models.hub_client import NETWORK_ERRORS, HubClient, HubFile

CHUNK_BYTES = 1 << 20
LOCK_POLL_S = 0.2
# Of one request: content networks refuse larger ones, and a signed address may end before they do.
REQUEST_BYTES = 8 << 30
RETRY_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # between attempts in which nothing came; there is one attempt more


class FileTransfer:
    """Fetches one file.

    Args:
        client: of the hub.
        cache: where the file goes.
        repo, commit: which model it is of.
        should_stop: asked now and then.

    Attributes:
        num_bytes: that are there.
    """

    def __init__(
        self,
        client: HubClient,
        cache: HubCache,
        repo: str,
        commit: str,
        file: HubFile,
        should_stop: Callable[[], bool],
    ) -> None:
        self.num_bytes = 0
        self._client = client
        self._repo, self._commit, self._file = repo, commit, file
        self._blob = cache.blob(repo, file.digest)
        self._partial = partial_path(cache, repo, file)
        self._should_stop = should_stop
        self._digest = Digest(file)

    def run(self) -> None:
        """Fetch what is missing.

        Waits for another process that fetches it.

        Raises:
            ModelError: the hub refuses, or the contents are not what they should be.
            HubUnreachableError: the hub does not answer; what has come is kept.
            NotEnoughDiskError: the disk does not take it.
        """
        self._blob.parent.mkdir(parents=True, exist_ok=True)
        with self._partial.open("a+b") as out:
            is_locked = self._lock(out)
            if self._blob.exists():  # another process has fetched it meanwhile
                self._partial.unlink(missing_ok=True)
            elif is_locked:
                self._continue(out)

    def _lock(self, out: IO[bytes]) -> bool:
        """Wait until no other process writes to the file; False = this one is to stop before that."""
        while not self._should_stop():
            try:
                fcntl.flock(out.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
        return False

    def _continue(self, out: IO[bytes]) -> None:
        self.num_bytes = self._digest.read(out)
        if self.num_bytes > self._file.num_bytes:
            self._restart(out)
        waits = list(RETRY_WAITS_S)
        while self.num_bytes < self._file.num_bytes and not self._should_stop():
            before = self.num_bytes
            try:
                self._receive(out)
                problem: Exception | None = None
            except (HubUnreachableError, *NETWORK_ERRORS) as error:
                problem = error
            if self.num_bytes > before:
                waits = list(RETRY_WAITS_S)
            elif waits:
                time.sleep(waits.pop(0))
            else:
                raise self._broken(problem) from problem
        if not self._should_stop():
            self._finish(out)

    def _receive(self, out: IO[bytes]) -> None:
        """One request, for what is missing."""
        begin, end = self.num_bytes, min(self._file.num_bytes, self.num_bytes + REQUEST_BYTES)
        with self._client.open(self._repo, self._commit, self._file.name, begin, end) as (stream, place):
            if place != begin:  # the hub sends all of it
                self._restart(out)
                end = self._file.num_bytes
            while self.num_bytes < end and not self._should_stop():
                chunk = stream.read(min(CHUNK_BYTES, end - self.num_bytes))
                if not chunk:
                    return
                self._keep(out, chunk)

    def _keep(self, out: IO[bytes], chunk: bytes) -> None:
        try:
            out.write(chunk)
            out.flush()  # what a process has received is kept when it is killed
        except OSError as error:
            raise NotEnoughDiskError(
                f"cannot write {self._partial}: {error.strerror}",
                hint="free disk space, and start again",
                field="model",
            ) from error
        self._digest.update(chunk)
        self.num_bytes += len(chunk)

    def _restart(self, out: IO[bytes]) -> None:
        out.truncate(0)
        self._digest = Digest(self._file)
        self.num_bytes = 0

    def _finish(self, out: IO[bytes]) -> None:
        """Verify, and put the contents in their place."""
        if not self._digest.is_right():
            self._partial.unlink(missing_ok=True)
            raise ModelError(
                f"{self._file.name} of {self._repo} is not what the hub lists: its checksum is wrong; it was removed",
                hint="download it again; if that does not help, something between here and the hub changes it",
                field=self._file.name,
            )
        os.fsync(out.fileno())
        os.replace(self._partial, self._blob)

    def _broken(self, problem: Exception | None) -> QuireError:
        if isinstance(problem, QuireError):
            return problem
        return HubUnreachableError(
            f"the transfer of {self._file.name} broke after {self.num_bytes} of {self._file.num_bytes} bytes"
            + (f": {problem}" if problem else ""),
            hint="start again: it continues where it broke", field="model",
        )  # fmt: skip


class Digest:
    """The hash of a file's contents: SHA-256 of large files, of others that by which git names them."""

    def __init__(self, file: HubFile) -> None:
        self._expected = file.digest
        if len(file.digest) == 64:
            self._hash = hashlib.sha256()
        else:
            self._hash = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)

    def read(self, stream: IO[bytes]) -> int:
        """Take in a file from its beginning; returns its bytes."""
        stream.seek(0)
        num_bytes = 0
        while chunk := stream.read(CHUNK_BYTES):
            self.update(chunk)
            num_bytes += len(chunk)
        return num_bytes

    def update(self, chunk: bytes) -> None:
        """Take in what comes next."""
        self._hash.update(chunk)

    def is_right(self) -> bool:
        """Whether what was taken in is what the hub lists."""
        return self._hash.hexdigest() == self._expected


def partial_path(cache: HubCache, repo: str, file: HubFile) -> Path:
    """Where the contents of a file are until they are complete."""
    blob = cache.blob(repo, file.digest)
    return blob.with_name(blob.name + PARTIAL)
