"""CacheView: what a client may see of the prefix cache.

Made by `state.make_state`, asked for answers. A client learns of pages of its own namespace alone. Where several
parties share one namespace, reasons and positions would let one find out another's prompt token by token: there a
report says no more of pages than how many were found, which the time of an answer tells as well.
"""

from __future__ import annotations

from typing import Any

from quire.core.cache_info import MissReason, PrefixCacheInfo
from quire.server.http.tenants import Tenants

# What follows from the request and the settings, whatever others have sent.
_OWN_REASONS = frozenset((
    MissReason.BELOW_ONE_PAGE, MissReason.LAST_TOKEN, MissReason.CACHING_OFF, MissReason.READING_SKIPPED,
    MissReason.PROMPT_LOGPROBS, MissReason.PREEMPTED,
))  # fmt: skip


class CacheView:
    """Reports for the clients of one server.

    Args:
        tenants: of the server.
        isolate_tenants: each has a namespace of its own.
    """

    def __init__(self, tenants: Tenants, isolate_tenants: bool) -> None:
        self._tenants = tenants
        self._isolate_tenants = isolate_tenants

    def report(self, info: PrefixCacheInfo) -> dict[str, Any]:
        """The `prefix_cache` of an answer."""
        miss = info.miss
        if miss is None:
            return {"cached_tokens": info.cached_tokens, "reason": None, "position": None}
        reason, position = miss.reason, miss.position
        is_shared = self._tenants.has_several and not self._isolate_tenants
        if is_shared and reason not in _OWN_REASONS:
            reason, position = MissReason.COLD, info.cached_tokens
        return {"cached_tokens": info.cached_tokens, "reason": str(reason), "position": position}
