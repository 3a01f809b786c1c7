"""From what the user calls a model to a local directory. Holds no state."""

from __future__ import annotations

from pathlib import Path

from quire import envs
from quire.errors import HubUnreachableError, ModelError
from quire.formats.gguf_file import find_gguf, is_gguf
from quire.logger import get_logger
from quire.models.repo_files import checked_name
from quire.utils.progress_line import ProgressLine

logger = get_logger(__name__)

EMBEDDED_MODEL = "leaf"


def resolve_model_path(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The directory or GGUF file of `model`: "leaf" (embedded in the package), a local one, or a hub id to download.

    A directory of GGUF files without safetensors stands for the one model in it; of a split one any part will do.

    Raises:
        ModelError: none of these, several GGUF models in a directory, or the download failed.
    """
    if model == EMBEDDED_MODEL:
        return _embedded_model()
    path = Path(model).expanduser()
    if model and path.is_dir():
        directory = path.resolve()
        return _gguf_in(directory) or directory
    if path.is_file() and is_gguf(path):
        return path.absolute()  # links are kept: in the hub's cache the names of parts are theirs
    if path.is_file():
        raise ModelError(
            f"model {model!r} is a file", hint="pass a .gguf file, or the directory that contains config.json",
            field="model",
        )  # fmt: skip
    try:
        checked_name(model)
    except ModelError as cause:
        raise ModelError(
            f"model {model!r} is neither an existing directory nor a hub id",
            hint="use 'leaf', a directory, a .gguf file, or an id like 'Qwen/Qwen3-0.6B'",
            field="model",
        ) from cause
    return _download(model, revision, download_dir)


def _gguf_in(directory: Path) -> Path | None:
    """The GGUF file of a directory without other weights; None when there is none."""
    return None if list(directory.glob("*.safetensors")) else find_gguf(directory)


def _embedded_model() -> Path:
    path = Path(__file__).resolve().parent.parent / "assets" / EMBEDDED_MODEL
    if not (path / "config.json").is_file():
        raise ModelError(
            "this installation does not include the embedded model 'leaf'",
            hint="reinstall quire, or use a model directory or hub id",
            field="model",
        )
    return path


def _download(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The model's files, which are downloaded as far as they are missing; without the hub, what there is of them."""
    # Late: HTTP takes a while to import, and most starts need none.
    from quire.models.pull import cached_model, pull_model

    line = ProgressLine(f"downloading {model}")
    try:
        return pull_model(model, revision, download_dir, progress=line.show).path
    except HubUnreachableError as error:
        path = cached_model(model, revision, download_dir)
        if path is None:
            raise ModelError(
                f"model {model!r} is not in the local cache, and {error.message}",
                hint="go online once (quire pull MODEL), or use a local directory", field="model",
            ) from error  # fmt: skip
        if not envs.hub_is_offline():
            logger.warning("%s; using what is in the cache: %s", error.message, path)
        return path
    finally:
        line.end()
