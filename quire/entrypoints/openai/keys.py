"""ApiKeys: which keys open the server, and whose they are. Read once at the start."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from quire import envs
from quire.config.server import ApiConfig
from quire.errors import ConfigError

MIN_KEY_CHARS = 8
MAX_FILE_BYTES = 1 << 20
TENANT = re.compile(r"[\w.-]{1,64}", re.ASCII)
DEFAULT_TENANT = "default"


class ApiKeys:
    """Digests of the keys that are valid, each with its tenant.

    Args:
        tenants: key -> tenant.
    """

    def __init__(self, tenants: dict[str, str]) -> None:
        self._tenants = [(_digest(key.encode()), tenant) for key, tenant in tenants.items()]
        self.num_tenants = len(set(tenants.values()))

    def __bool__(self) -> bool:
        """True when a key is needed."""
        return bool(self._tenants)

    def tenant_of(self, authorization: bytes) -> str | None:
        """The tenant of an Authorization header; None when its key is not valid.

        Takes the same time whatever the key: digests are compared, all of them, in constant time each.
        """
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        found: str | None = None
        for valid, tenant in self._tenants:
            if hmac.compare_digest(valid, digest):
                found = tenant
        return found if scheme.lower() == b"bearer" else None


def read_api_keys(config: ApiConfig) -> ApiKeys:
    """The keys of the settings, the file and the environment.

    Raises:
        ConfigError: the file cannot be read, or a key in it is malformed.
    """
    tenants: dict[str, str] = {}
    for key in (config.api_key, envs.api_key()):
        if key:
            tenants[key] = DEFAULT_TENANT
    if config.api_key_file is not None:
        tenants.update(_read_file(config.api_key_file))
        if not tenants:
            raise ConfigError(
                f"{config.api_key_file} holds no key", hint="write one a line, or leave out api_key_file",
                field="api_key_file",
            )  # fmt: skip
    return ApiKeys(tenants)


def _read_file(path: str) -> dict[str, str]:
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"api_key_file {path} cannot be read: {reason}", hint="check the path", field="api_key_file"
        ) from None
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        tenant, separator, key = entry.partition("=")
        if not separator or not TENANT.fullmatch(tenant):
            tenant, key = DEFAULT_TENANT, entry
        if len(key) < MIN_KEY_CHARS or any(character.isspace() for character in key):
            raise ConfigError(
                f"api_key_file {path}, line {number}: a key has at least {MIN_KEY_CHARS} characters and no spaces",
                hint="for example: openssl rand -hex 24", field="api_key_file",
            )  # fmt: skip
        tenants[key] = tenant
    return tenants


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
