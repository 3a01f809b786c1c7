"""Which past answers a request may be drafted from: the namespaces of the answer store. Pure functions.

The store itself is native (`csrc/answer_store.cpp`): bounded in bytes and answers, the least recently used ones leave.
"""

from __future__ import annotations

DEFAULT_STORE_BYTES = 64 << 20
"""Of past answers with their indices; about half a million tokens."""


def answer_namespace(tenant: str, cache_salt: str | None, *, is_shared: bool) -> bytes:
    """The namespace of a tenant's requests with this salt, different for any two; one for all where they share."""
    if is_shared:
        return b""
    salt = "none" if cache_salt is None else f"salt:{cache_salt}"
    return f"{len(tenant)}:{tenant}{salt}".encode(errors="surrogatepass")
