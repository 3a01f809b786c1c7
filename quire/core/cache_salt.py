"""The salt that keeps a tenant's blocks of the prefix cache apart from others'. Pure functions."""

from __future__ import annotations

import hashlib

_PREFIX = "tenant:"


def tenant_salt(tenant: str, salt: str | None) -> str:
    """The salt of a tenant's requests that asked for `salt` themselves; tells nothing of either text."""
    own = salt or ""
    return f"{_PREFIX}{_digest(tenant)}:{_digest(f'{tenant}/{own}')}"


def tenant_part(salt: str) -> str:
    """The same for all salts of one tenant; "" for a salt that is no tenant's."""
    return salt.split(":")[1] if salt.startswith(_PREFIX) else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
