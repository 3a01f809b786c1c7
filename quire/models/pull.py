"""From the name of a model on the hub to its files on this disk: `pull_model` asks the hub, `cached_model` only looks.

Called by `models.hub` for a start, and by `quire pull`. Both choose files by `repo_files`. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire import envs
from quire.errors import HubUnreachableError
from quire.models.hub_cache import HubCache
from quire.models.hub_client import HubClient
from quire.models.hub_download import Download, DownloadPlan, Progress, plan_download
from quire.models.repo_files import RepoChoice, checked_name, choose_files, included_files

DEFAULT_REVISION = "main"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A model on this disk.

    Attributes:
        path: its directory, or its GGUF file, of several the first.
        plan: what was missing.
    """

    path: Path
    plan: DownloadPlan


def pull_model(
    model: str,
    revision: str | None = None,
    cache_dir: str | None = None,
    *,
    include: Sequence[str] = (),
    verifies: bool = False,
    on_plan: Callable[[DownloadPlan], None] | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Download what is missing of a model of the hub.

    Args:
        model: "org/name", or "org/name:QUANT" for a GGUF file of this quantization.
        revision: branch, tag or commit; None = main.
        cache_dir: None = the cache of all programs.
        include: patterns of files to fetch in place of those that are needed to run the model.
        verifies: read what is there, and fetch again what is damaged.
        on_plan: called before anything is fetched.
        progress: as `Download.run`.

    Raises:
        ModelError: the name is not a valid one, the hub refuses it, or its files cannot be used.
        HubUnreachableError: the hub does not answer, or HF_HUB_OFFLINE is set.
        NotEnoughDiskError: the files do not fit on the disk.
    """
    repo, quant = checked_name(model)
    if envs.hub_is_offline():
        raise HubUnreachableError("HF_HUB_OFFLINE is set: the hub is not asked", hint="unset it", field="model")
    client, cache = HubClient(), model_cache(cache_dir)
    commit = client.commit(repo, revision or DEFAULT_REVISION)
    files = {file.name: file for file in client.files(repo, commit)}
    choice = included_files(repo, files, include) if include else choose_files(repo, files, quant)
    plan = plan_download(cache, repo, commit, [files[name] for name in choice.paths], verifies=verifies)
    if on_plan is not None:
        on_plan(plan)
    directory = Download(client, cache, plan).run(progress)
    cache.set_ref(repo, revision or DEFAULT_REVISION, commit)
    return Pulled(_path(directory, choice), plan)


def cached_model(model: str, revision: str | None = None, cache_dir: str | None = None) -> Path | None:
    """Where a model of the hub is on this disk, as it was last downloaded; None = it is not there.

    Raises:
        ModelError: the name is not a valid one, or what is there lacks files.
    """
    repo, quant = checked_name(model)
    cache = model_cache(cache_dir)
    commit = cache.commit(repo, revision or DEFAULT_REVISION)
    if commit is None:
        return None
    return _path(cache.snapshot(repo, commit), choose_files(repo, cache.files(repo, commit), quant))


def model_cache(cache_dir: str | None = None) -> HubCache:
    """The cache of all programs, or the one in `cache_dir`."""
    return HubCache(Path(cache_dir).expanduser() if cache_dir else envs.hub_cache())


def _path(directory: Path, choice: RepoChoice) -> Path:
    return directory if choice.gguf is None else directory / choice.gguf
