"""vLLM's `tokenizers`: a model's tokenizer without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import require_unset
from quire.models.hub import resolve_model_path
from quire.tokenization.chat_template import load_chat_template
from quire.tokenization.hf_tokenizer import HFTokenizer
from quire.tokenization.hf_tokenizer import HFTokenizer as AnyTokenizer
from quire.tokenization.hf_tokenizer import HFTokenizer as TokenizerLike
from quire.tokenization.tokenizer import load_tokenizer

__all__ = ["AnyTokenizer", "TokenizerLike", "cached_get_tokenizer", "get_tokenizer"]


__path__: list[str] = []  # a package, so that modules below it are looked for


def get_tokenizer(
    tokenizer_name: str | Path,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **others: Any,
) -> HFTokenizer:
    """The tokenizer of a model: "leaf", a directory or a hub id.

    Args:
        trust_remote_code: without effect: code from model directories is never run.

    Raises:
        ModelError: there is no such model.
        UnsupportedError: another argument is given.
    """
    require_unset(**others)
    tokenizer = load_tokenizer(resolve_model_path(str(tokenizer_name), revision, download_dir))
    return HFTokenizer(tokenizer, load_chat_template(tokenizer))


cached_get_tokenizer = get_tokenizer
