"""Downloads the files of a model into the cache, several at once: what is missing, and no more.

Called by `models.hub` for a start, and by `quire pull`. A `Download` owns its threads; what a process that is killed
has fetched stays, and the next one continues.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from quire.errors import NotEnoughDiskError, QuireError, QuireServerError
from quire.models.hub_cache import HubCache
from quire.models.hub_client import HubClient, HubFile
from quire.models.hub_file import Digest, FileTransfer, partial_path
from quire.utils.memory import MIB, format_bytes

NUM_THREADS = 4
SPARE_BYTES = 64 * MIB  # of the disk, left for others
POLL_S = 0.1

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """What is to be downloaded.

    Attributes:
        repo, commit: which model.
        files: all that were chosen.
        missing: those of them whose contents are not in the cache, each contents once.
        partial_bytes: of the missing, on the disk already.
    """

    repo: str
    commit: str
    files: tuple[HubFile, ...]
    missing: tuple[HubFile, ...]
    partial_bytes: int

    @property
    def num_bytes(self) -> int:
        """That have to come."""
        return sum(file.num_bytes for file in self.missing) - self.partial_bytes


def plan_download(
    cache: HubCache, repo: str, commit: str, files: Iterable[HubFile], *, verifies: bool = False
) -> DownloadPlan:
    """Find out what is missing.

    Args:
        verifies: contents that are there are read; those whose hash is wrong are removed, and missing.

    Raises:
        NotEnoughDiskError: it does not fit on the disk.
    """
    chosen = tuple(files)
    contents = {file.digest: file for file in chosen}
    missing = tuple(file for file in contents.values() if not _is_there(cache, repo, file, verifies))
    paths = [partial_path(cache, repo, file) for file in missing]
    partial_bytes = sum(path.stat().st_size for path in paths if path.exists())
    plan = DownloadPlan(repo, commit, chosen, missing, partial_bytes)
    _check_disk(cache.root, plan)
    return plan


class Download:
    """Fetches what a plan lacks."""

    def __init__(self, client: HubClient, cache: HubCache, plan: DownloadPlan) -> None:
        self._cache = cache
        self._plan = plan
        self._is_stopped = False
        transfer = partial(FileTransfer, client, cache, plan.repo, plan.commit, should_stop=lambda: self._is_stopped)
        largest_first = sorted(plan.missing, key=lambda file: -file.num_bytes)
        self._transfers = [transfer(file) for file in largest_first]
        self._waiting: SimpleQueue[FileTransfer] = SimpleQueue()
        self._errors: list[QuireError] = []

    def run(self, progress: Progress | None = None) -> Path:
        """Fetch, verify and link; returns the directory of the commit's files.

        Args:
            progress: called ten times a second with the bytes that are there and those that there will be.

        Raises:
            ModelError: the hub refuses, or contents are not what they should be.
            HubUnreachableError: the hub does not answer.
            NotEnoughDiskError: the disk does not take it.
        """
        for transfer in self._transfers:
            self._waiting.put(transfer)
        self._fetch_all(progress or (lambda done, total: None))
        for file in self._plan.files:
            self._cache.link(self._plan.repo, self._plan.commit, file.name, file.digest)
        return self._cache.snapshot(self._plan.repo, self._plan.commit)

    def _fetch_all(self, progress: Progress) -> None:
        """Run the threads. They are daemons: a program that is interrupted does not wait for a silent hub."""
        total = sum(file.num_bytes for file in self._plan.missing)
        num = min(NUM_THREADS, len(self._transfers))
        threads = [threading.Thread(target=self._work, name="download", daemon=True) for _ in range(num)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(POLL_S)
                    progress(sum(transfer.num_bytes for transfer in self._transfers), total)
        finally:
            self._is_stopped = True
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        """Fetch one file after the other, until there are no more or one of any thread has failed."""
        while not self._is_stopped:
            try:
                self._waiting.get_nowait().run()
            except Empty:
                return
            except QuireError as error:
                self._errors.append(error)
                self._is_stopped = True
            except OSError as error:  # of the disk: those of the network are handled where they occur
                problem = f"cannot write to {self._cache.root}: {error.strerror or error}"
                self._errors.append(QuireServerError(problem, hint="check its permissions, or set HF_HUB_CACHE"))
                self._is_stopped = True


def _is_there(cache: HubCache, repo: str, file: HubFile, verifies: bool) -> bool:
    """Whether contents are in the cache; damaged ones are removed."""
    blob = cache.blob(repo, file.digest)
    if not blob.exists():
        return False
    is_right = blob.stat().st_size == file.num_bytes
    if is_right and verifies:
        digest = Digest(file)
        with blob.open("rb") as stream:
            digest.read(stream)
        is_right = digest.is_right()
    if not is_right:
        blob.unlink()
    return is_right


def _check_disk(root: Path, plan: DownloadPlan) -> None:
    if plan.num_bytes <= 0:
        return
    place = next(path for path in (root, *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if plan.num_bytes + SPARE_BYTES > free:
        raise NotEnoughDiskError(
            f"{plan.repo} needs {format_bytes(plan.num_bytes)} more, {format_bytes(free)} is free at {place}",
            hint="free disk space (quire list, quire rm), or set HF_HUB_CACHE to another disk", field="model",
        )  # fmt: skip
