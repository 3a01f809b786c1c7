"""ApiKeys: which keys open the server, whose they are, and what their tenants may do.

Read at the start, and again when the file changes (`key_watch`). No state beyond what was read.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire import envs
from quire.config.base import info_of, settings_of
from quire.config.server import ApiConfig, ServerConfig
from quire.config.tenants import TenantLimits
from quire.errors import ConfigError, QuireError, unknown_name
from quire.utils.checks import check_text, shown, wrong_type

MIN_KEY_CHARS = 8
FINGERPRINT_DIGITS = 12
"""By which a key is named where it must not be shown: so many of its SHA-256."""
MAX_FILE_BYTES = 1 << 20
MAX_YAML_EVENTS = 100_000
TENANT = re.compile(r"[\w.-]{1,64}", re.ASCII)
DEFAULT_TENANT = "default"
YAML_START = re.compile(rb"(?:[ \t]*(?:#[^\n]*)?\r?\n|---[ \t]*\r?\n)*tenants[ \t]*:(?:[ \t#{]|\r?\n|$)")
KEY_HINT = "for example: openssl rand -hex 24"


class ApiKeys:
    """Digests of the keys that are valid, each with its tenant.

    Args:
        tenants: key -> tenant.
        limits: tenant -> what it may do; tenants that are left out have no limits.
    """

    def __init__(self, tenants: dict[str, str], limits: Mapping[str, TenantLimits] | None = None) -> None:
        self._tenants = [(_digest(key.encode()), tenant) for key, tenant in tenants.items()]
        self.limits = {tenant: TenantLimits() for tenant in tenants.values()} | dict(limits or {})
        self.num_tenants = len(set(tenants.values()))

    def __bool__(self) -> bool:
        """True when a key is needed."""
        return bool(self._tenants)

    def tenant_of(self, authorization: bytes) -> str | None:
        """The tenant of an Authorization header; None when its key is not valid."""
        found = self.find(authorization)
        return None if found is None else found[0]

    def find(self, authorization: bytes) -> tuple[str, str] | None:
        """Tenant and fingerprint of the key of an Authorization header; None when the key is not valid.

        Takes the same time whatever the key: digests are compared, all of them, in constant time each.
        """
        scheme, _, key = authorization.partition(b" ")
        digest = _digest(key.strip())
        found: str | None = None
        for valid, tenant in self._tenants:
            if hmac.compare_digest(valid, digest):
                found = tenant
        if found is None or scheme.lower() != b"bearer":
            return None
        return found, digest.hex()[:FINGERPRINT_DIGITS]


def read_api_keys(config: ApiConfig) -> ApiKeys:
    """The keys of the settings, the file and the environment.

    Raises:
        ConfigError: the file cannot be read, or a key or a limit in it is malformed.
    """
    tenants: dict[str, str] = {}
    limits: dict[str, TenantLimits] = {}
    for key in (*config.api_key, *envs.api_keys()):
        if key:
            tenants[key] = DEFAULT_TENANT
    if config.api_key_file is not None:
        keys, limits = _read_file(config.api_key_file)
        for key, tenant in keys.items():
            if tenants.get(key, tenant) != tenant:
                raise ConfigError(
                    f"api_key_file {config.api_key_file}: a key of tenant {tenant} is also in api_key or "
                        f"QUIRE_API_KEY, for tenant {tenants[key]}",
                    hint="keep one of them", field="api_key_file",
                )  # fmt: skip
        tenants.update(keys)
        if not tenants:
            raise ConfigError(
                f"{config.api_key_file} contains no keys", hint="write one per line, or leave out api_key_file",
                field="api_key_file",
            )  # fmt: skip
    return ApiKeys(tenants, limits)


def read_checked_keys(config: ServerConfig, policy: str) -> ApiKeys:
    """As `read_api_keys`, and as `check_limits` for an engine with scheduling_policy `policy`."""
    keys, limits = read_api_keys(config.api), config.limits
    has_queue_limits = limits.max_num_queued_reqs is not None or limits.max_num_queued_tokens is not None
    check_limits(keys, policy=policy, has_queue_limits=has_queue_limits)
    return keys


def check_limits(keys: ApiKeys, *, policy: str, has_queue_limits: bool) -> None:
    """Refuse limits that the server's other settings make meaningless.

    Args:
        policy: the engine's scheduling_policy.
        has_queue_limits: one of max_num_queued_reqs and max_num_queued_tokens is set.

    Raises:
        ConfigError: tenant and limit are named.
    """
    for tenant, limits in keys.limits.items():
        _check_policy(tenant, limits, policy)
        if limits.queue_share is not None and not has_queue_limits:
            raise ConfigError(
                f"tenant {tenant}: queue_share needs a queue limit",
                hint="set max_num_queued_reqs or max_num_queued_tokens, or leave out queue_share", field="queue_share",
            )  # fmt: skip


def _check_policy(tenant: str, limits: TenantLimits, policy: str) -> None:
    """Refuse what the scheduling policy does not look at."""
    if limits.priority and "priority" not in (policy, limits.policy if policy == "fair" else ""):
        raise ConfigError(
            f"tenant {tenant}: priority={limits.priority} has no effect under scheduling_policy={policy!r}",
            hint="write policy: priority for this tenant" if policy == "fair" else "leave out priority",
            field="priority",
        )  # fmt: skip
    for name, value, default in (("weight", limits.weight or 1, 1), ("policy", limits.policy, "fcfs")):
        if value != default and policy != "fair":
            raise ConfigError(
                f"tenant {tenant}: {name}={value} has no effect under scheduling_policy={policy!r}, which has "
                "no shares between tenants",
                hint=f"start with --scheduling-policy fair, or leave out {name}", field=name,
            )  # fmt: skip


def _read_file(path: str) -> tuple[dict[str, str], dict[str, TenantLimits]]:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"api_key_file {path} cannot be read: {reason}", hint="check the path", field="api_key_file"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"api_key_file {path} is larger than {MAX_FILE_BYTES} bytes", hint="is it the right file?",
            field="api_key_file",
        )  # fmt: skip
    if YAML_START.match(data):
        return _read_tenants(path, data)
    return _read_lines(path, text), {}


def _read_lines(path: str, text: str) -> dict[str, str]:
    """The keys of a file of `key` and `tenant=key` lines."""
    tenants: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        tenant, separator, key = entry.partition("=")
        if not separator or not TENANT.fullmatch(tenant):
            tenant, key = DEFAULT_TENANT, entry
        where = f"api_key_file {path}, line {number}"
        _check_key(where, key)
        if key in tenants:
            raise ConfigError(
                f"{where}: duplicate key (tenants {tenants[key]} and {tenant})", hint="keep one",
                field="api_key_file",
            )  # fmt: skip
        tenants[key] = tenant
    return tenants


def _read_tenants(path: str, data: bytes) -> tuple[dict[str, str], dict[str, TenantLimits]]:
    """The keys and limits of a file of tenants in YAML."""
    from quire.utils.yaml_config import parse_yaml  # late: files of lines, and servers without keys, need no YAML

    entries = parse_yaml(path, data, kind="api_key_file", field="api_key_file", max_events=MAX_YAML_EVENTS)
    for index, (name, _) in enumerate(entries):
        if name != "tenants" or index:
            raise ConfigError(
                f"api_key_file {path}: {shown(name)} next to tenants", hint="the only top-level entry is tenants",
                field="api_key_file",
            )  # fmt: skip
    named = entries[0][1]
    if not isinstance(named, dict) or not named:
        raise wrong_type("tenants", named, "a mapping of tenant names to keys and limits", ConfigError)
    keys: dict[str, str] = {}
    limits: dict[str, TenantLimits] = {}
    for tenant, values in named.items():
        if not isinstance(tenant, str) or not TENANT.fullmatch(tenant):
            raise ConfigError(
                f"api_key_file {path}: {shown(tenant)} is not a valid tenant name",
                hint="1 to 64 letters, digits, dots, dashes and underscores", field="tenants",
            )  # fmt: skip
        where = f"api_key_file {path}, tenant {tenant}"
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: keys are missing", hint="write keys: [...] below its name", field="keys")
        values = dict(values)
        for key in _read_keys(where, tenant, values.pop("keys", None)):
            if key in keys:
                raise ConfigError(f"{where}: duplicate key", hint="keep one", field="keys")
            keys[key] = tenant
        limits[tenant] = _read_limits(where, values)
    return keys, limits


def _read_keys(where: str, tenant: str, keys: Any) -> list[str]:
    if keys is None and tenant == DEFAULT_TENANT:  # its keys may be those of the settings and the environment
        return []
    if not isinstance(keys, list) or not keys:
        raise ConfigError(f"{where}: keys must be a list of at least one", hint="write keys: [...]", field="keys")
    for index, key in enumerate(keys):
        if not isinstance(key, str):
            raise ConfigError(
                f"{where}: keys[{index}] must be a string, not {type(key).__name__}",
                hint="put it in quotes",
                field="keys",
            )
        _check_key(f"{where}, keys[{index}]", key)
    return keys


def _read_limits(where: str, values: dict[str, Any]) -> TenantLimits:
    known = {info_of(field).name for field in settings_of(TenantLimits)}
    try:
        for name in values:
            if name not in known:
                raise unknown_name("limit", check_text("a limit's name", name), [*known, "keys"])
        return TenantLimits(**values)
    except QuireError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint, field=error.field) from None


def _check_key(where: str, key: str) -> None:
    if len(key) < MIN_KEY_CHARS or any(character.isspace() for character in key):
        raise ConfigError(
            f"{where}: a key has at least {MIN_KEY_CHARS} characters and no spaces", hint=KEY_HINT,
            field="api_key_file",
        )  # fmt: skip


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
