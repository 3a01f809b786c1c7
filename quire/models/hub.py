"""From what the user calls a model to a local directory. Holds no state."""

from __future__ import annotations

import re
from pathlib import Path

from quire.errors import ModelError

EMBEDDED_MODEL = "leaf"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9_][\w.\-]{0,95})?")
# Descriptions, safetensors weights, tokenizers and chat templates: nothing that could run code.
ALLOWED_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
IGNORED_FILES = ["*.py", "original/*", "consolidated*", "onnx/*"]

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
    if not HUB_ID.fullmatch(model) or ".." in model:
        raise ModelError(
            f"model {model!r} is neither an existing directory nor a hub id",
            hint="use 'leaf', a directory, or an id like 'Qwen/Qwen3-0.6B'",
            field="model",
        )
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
    # Late: the hub client takes 0.3 s to import, and most starts need no download.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=ALLOWED_FILES,
            ignore_patterns=IGNORED_FILES,
        )
    except LocalEntryNotFoundError as cause:
        raise ModelError(
            f"model {model!r} is not in the local cache and the hub cannot be reached",
            hint="go online once, or use a local directory",
            field="model",
        ) from cause
    except (HfHubHTTPError, HFValidationError, OSError) as cause:
        first_line = str(cause).strip().partition("\n")[0]
        raise ModelError(
            f"model {model!r} cannot be downloaded: {first_line}",
            hint="check the id, the revision, and HF_TOKEN for a gated model; or use a local directory",
            field="model",
        ) from cause
    return Path(found)
