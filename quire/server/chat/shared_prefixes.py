"""SharedPrefixes: beginnings of prompts that the operator declares as no tenant's secret.

Full pages of the prefix cache that lie wholly inside one are shared by all tenants; what follows stays within its
tenant. Asked by the routes. Read once at the start; nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.core.inputs import TokensPrompt
from quire.engine.protocol import EngineClient
from quire.errors import ConfigError, QuireClientError, unknown_name
from quire.logger import get_logger
from quire.server.chat.prompts import PromptReader
from quire.utils.checks import check_int_list, check_text

logger = get_logger(__name__)

FIELD = "shared_prefixes"
FORMS = ("system", "text", "token_ids")
MAX_FILE_BYTES = 4 << 20
MAX_PREFIXES = 256
MAX_EVENTS = 1 << 20


class SharedPrefixes:
    """Declared beginnings of prompts.

    Args:
        prefixes: name -> token ids.
    """

    def __init__(self, prefixes: Mapping[str, Sequence[int]]) -> None:
        self._longest_first = sorted({tuple(ids) for ids in prefixes.values()}, key=len, reverse=True)

    def num_shared_tokens(self, token_ids: tuple[int, ...]) -> int:
        """Length of the longest declared prefix that a prompt begins with; 0 = none."""
        return next((len(ids) for ids in self._longest_first if token_ids[: len(ids)] == ids), 0)

    def marked(self, prompt: TokensPrompt) -> TokensPrompt:
        """`prompt`, with how much of it is shared."""
        num_shared = self.num_shared_tokens(prompt.prompt_token_ids)
        return replace(prompt, num_shared_tokens=num_shared) if num_shared else prompt


def read_shared_prefixes(path: str | None, engine: EngineClient, reader: PromptReader) -> SharedPrefixes:
    """The prefixes that file `path` declares; none without one.

    Raises:
        ConfigError: it cannot be read, or an entry cannot be the beginning of a prompt; the entry is named.
    """
    if path is None:
        return SharedPrefixes({})
    if not engine.config.cache.enable_prefix_caching:
        raise ConfigError(
            f"{FIELD} has no effect without prefix caching", hint="leave out one of the two settings", field=FIELD
        )
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{FIELD} {path} cannot be read: {error.strerror}", hint="check the path", field=FIELD
        ) from None
    from quire.utils.yaml_config import parse_yaml  # late: few servers need it

    entries = parse_yaml(path, data, kind=FIELD, field=FIELD, max_events=MAX_EVENTS)
    if len(data) > MAX_FILE_BYTES or len(entries) > MAX_PREFIXES:
        raise ConfigError(
            f"{FIELD} {path} has more than {MAX_PREFIXES} entries or {MAX_FILE_BYTES} bytes", hint="declare fewer",
            field=FIELD,
        )  # fmt: skip
    prefixes: dict[str, list[int]] = {}
    for name, value in entries:
        where = f"{FIELD} {path}, {name}"
        if name in prefixes:
            raise ConfigError(f"{where}: duplicate name", hint="remove one of them", field=FIELD)
        try:
            prefixes[name] = _token_ids(value, reader)
        except QuireClientError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint, field=FIELD) from None
        _note(where, len(prefixes[name]), engine.config.cache.block_size)
    return SharedPrefixes(prefixes)


def _token_ids(value: Any, reader: PromptReader) -> list[int]:
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError(f"it must have one of {', '.join(FORMS)}", hint="for example {system: You are ...}")
    ((form, content),) = value.items()
    if form not in FORMS:
        raise unknown_name("key of a prefix", str(form), FORMS)
    if form == "token_ids":
        ids = check_int_list(form, content, 0, reader.tokenizer().vocab_size - 1)
    elif not check_text(form, content):
        raise ConfigError(f"{form} is empty", hint="use at least one character")
    else:
        ids = reader.constant_prefix(**{form: content})
    if not ids:
        raise ConfigError("no prompt can begin with it", hint="use a longer one")
    return ids


def _note(where: str, num_tokens: int, block_size: int | None) -> None:
    """Say how much is shared; a prefix that fills no page is worth a warning."""
    num_pages = num_tokens // (block_size or 1)
    if num_pages:
        logger.info("%s: %d tokens, %d blocks shared by all tenants", where, num_tokens, num_pages)
    else:
        logger.warning(
            "%s: %d tokens do not fill a block of %s tokens, so nothing is shared", where, num_tokens, block_size
        )
