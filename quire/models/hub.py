"""From what the user calls a model to a local directory. Holds no state."""

from __future__ import annotations

from pathlib import Path

from quire import envs
from quire.errors import HubUnreachableError, ModelError
from quire.logger import get_logger
from quire.models.repo_files import checked_name
from quire.utils.progress_line import ProgressLine

logger = get_logger(__name__)

EMBEDDED_MODEL = "leaf"
NO_GGUF = "use the original model (safetensors), as a directory or hub id; --quantization int8 or int4 quantizes it"


def resolve_model_path(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The directory of `model`: "leaf" (embedded in the package), a local directory, or a hub id to download.

    Raises:
        ModelError: none of the three, or the download failed.
    """
    if model == EMBEDDED_MODEL:
        return _embedded_model()
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path.resolve()
    if path.is_file() and path.suffix.lower() == ".gguf":
        raise ModelError(f"model {model!r} is a GGUF file, which Quire does not support", hint=NO_GGUF, field="model")
    if path.is_file():
        raise ModelError(
            f"model {model!r} is a file", hint="pass the directory that contains config.json", field="model"
        )
    try:
        checked_name(model)
    except ModelError as cause:
        raise ModelError(
            f"model {model!r} is neither an existing directory nor a hub id",
            hint="use 'leaf', a directory, or an id like 'Qwen/Qwen3-0.6B'",
            field="model",
        ) from cause
    return _download(model, revision, download_dir)


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
