"""Placement: which of several replicas a request goes to. Used by front ends and simulated fleets; no clock.

Each replica is judged by how much it would compute before the request's first token: what waits or runs there, and the
part of the prompt that it has not cached. Where tenants share by weight (scheduling policy `fair`) a request waits for
the work of its own tenant and for as much of each other tenant's as that tenant's weight allows in the meantime, so a
flood by one tenant does not drive another from the replica that has its prefix. Owns the work it has placed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.core.engine_messages import EngineCoreRequest
from quire.scheduler.placed_prefixes import PlacedPrefixes, chunk_keys

DECODE_TOKENS = 32
"""Prompt tokens that delay others as much as one running request does."""


@dataclass(slots=True)
class _Placed:
    """Work of one request.

    Attributes:
        num_prompt_tokens: that are to be computed before its first token; 0 = it has one.
    """

    replica: int
    tenant: str
    num_prompt_tokens: int


class _Load:
    """What one replica has to do.

    Attributes:
        by_tenant: tokens of work.
        num_requests: unfinished.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self.by_tenant: dict[str, int] = {}
        self.num_requests = 0
        self.prefixes = PlacedPrefixes(capacity_tokens)

    def add(self, tenant: str, num_tokens: int) -> None:
        """More work, or less."""
        left = self.by_tenant.get(tenant, 0) + num_tokens
        if left > 0:
            self.by_tenant[tenant] = left
        else:
            self.by_tenant.pop(tenant, None)


class Placement:
    """Chooses replicas and keeps account of their work.

    Args:
        capacity_tokens: tokens that the KV cache of one replica holds.
        is_fair: tenants share a replica by weight; else requests are served as they come.
        has_cache: replicas keep prefixes.
    """

    def __init__(self, capacity_tokens: int, *, is_fair: bool = False, has_cache: bool = True) -> None:
        self._capacity_tokens = capacity_tokens
        self._is_fair = is_fair
        self._has_cache = has_cache
        self._loads: dict[int, _Load] = {}
        self._placed: dict[int, _Placed] = {}
        self._weights: dict[str, float] = {}
        self._turn = 0

    def add_replica(self, replica: int) -> None:
        """A replica can be given requests; its cache is empty."""
        self._loads[replica] = _Load(self._capacity_tokens)

    def remove_replica(self, replica: int) -> None:
        """A replica is gone; what it had is placed anew."""
        self._loads.pop(replica, None)

    def forget_cache(self, replica: int) -> None:
        """A replica has lost its cache."""
        if replica in self._loads:
            self._loads[replica].prefixes.clear()

    def replica_of(self, handle: int) -> int | None:
        """Where a request was placed; None = it was not, or has ended."""
        placed = self._placed.get(handle)
        return None if placed is None else placed.replica

    def num_requests(self, replica: int) -> int:
        """Unfinished requests of a replica."""
        load = self._loads.get(replica)
        return 0 if load is None else load.num_requests

    def place(self, request: EngineCoreRequest, allowed: Iterable[int]) -> int:
        """Choose one of the `allowed` replicas (one at least) and count the request there.

        Of several that are equally good the one with the fewest requests is chosen, and of these the next in turn.
        """
        candidates = list(allowed)
        self._turn += 1
        keys = chunk_keys(request) if self._has_cache and len(self._loads) > 1 else []
        if self._is_fair:
            self._weights[request.tenant] = request.tenant_weight
        first = candidates[self._turn % len(candidates) :] + candidates[: self._turn % len(candidates)]
        lacking = {one: self._num_lacking(request, keys, one) for one in candidates}
        waits = {one: self._wait(one, request, lacking[one] + DECODE_TOKENS) for one in candidates}
        chosen = min(first, key=lambda one: (waits[one], self._loads[one].num_requests))
        self._count(request, chosen, lacking[chosen])
        self._loads[chosen].prefixes.add(keys)
        return chosen

    def note_first_token(self, handle: int) -> None:
        """The prompt of a request is computed; harmless when repeated."""
        placed = self._placed.get(handle)
        if placed is not None and placed.num_prompt_tokens:
            load = self._loads.get(placed.replica)
            if load is not None:
                load.add(placed.tenant, -placed.num_prompt_tokens)
            placed.num_prompt_tokens = 0

    def remove(self, handle: int) -> None:
        """A request has ended, or is about to be placed anew; harmless when repeated."""
        self.note_first_token(handle)
        placed = self._placed.pop(handle, None)
        load = None if placed is None else self._loads.get(placed.replica)
        if placed is not None and load is not None:
            load.add(placed.tenant, -DECODE_TOKENS)
            load.num_requests -= 1
            if self._is_fair and not any(placed.tenant in one.by_tenant for one in self._loads.values()):
                self._weights.pop(placed.tenant, None)

    def _count(self, request: EngineCoreRequest, replica: int, num_lacking: int) -> None:
        tenant = request.tenant if self._is_fair else ""
        self._placed[request.handle] = _Placed(replica, tenant, num_lacking)
        load = self._loads[replica]
        load.add(tenant, num_lacking + DECODE_TOKENS)
        load.num_requests += 1

    def _num_lacking(self, request: EngineCoreRequest, keys: list[int], replica: int) -> int:
        """Tokens that the replica would have to compute."""
        output = request.output_token_ids
        num_tokens = len(request.prompt_token_ids) + (0 if output is None else len(output))
        return max(1, num_tokens - self._loads[replica].prefixes.num_tokens(keys))

    def _wait(self, replica: int, request: EngineCoreRequest, cost: int) -> float:
        """Tokens that the replica computes until it has done `cost` tokens for this request."""
        work = self._loads[replica].by_tenant
        if not self._is_fair:
            return work.get("", 0) + cost
        own = work.get(request.tenant, 0) + cost
        per_weight = own / request.tenant_weight
        others = (
            min(float(tokens), per_weight * self._weights[name])
            for name, tokens in work.items()
            if name != request.tenant
        )
        return own + sum(others)
