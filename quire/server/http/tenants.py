"""Tenants: whose a request is, and whether its tenant may have it run.

Asked by the gate for every request and by admission for every one that is to run. Owns what each tenant has used. No
message names another tenant, or a number that others have a part in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from quire.config.tenants import TenantLimits
from quire.core.tenancy import TenantShare
from quire.server.http.errors import (
    BAD_REQUEST,
    LIMITED_REQUESTS,
    LIMITED_TOKENS,
    ApiError,
    ErrorKind,
)
from quire.server.http.keys import DEFAULT_TENANT, ApiKeys
from quire.server.http.rate_limits import Bucket, duration, rate_headers

CONCURRENT_RETRY_S = 1


class Tenant:
    """One tenant, and what it uses."""

    def __init__(self, name: str, limits: TenantLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limits = limits
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._num_requests = self._num_answers = 0
        self.set_limits(limits)

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return self._num_requests

    @property
    def num_answers(self) -> int:
        """The same in answers."""
        return self._num_answers

    @property
    def share(self) -> TenantShare:
        """What the scheduler knows of it."""
        return self._share

    @property
    def is_operator(self) -> bool:
        """True when it may read what is about all tenants."""
        return self.name == DEFAULT_TENANT if self.limits.operator is None else self.limits.operator

    @property
    def counts_tokens(self) -> bool:
        """True when new tokens must be reported as they come."""
        return self._tokens is not None

    def set_limits(self, limits: TenantLimits) -> None:
        """Take other limits; what was used stays used."""
        self.limits = limits
        self._share = TenantShare(name=self.name, weight=limits.weight or 1.0, policy=limits.policy)
        self._requests = self._bucket(0, self._requests, limits.requests_per_minute)
        self._tokens = self._bucket(1, self._tokens, limits.tokens_per_minute)

    def check(self, num_tokens: int, num_prompts: int = 1, charge: Charge | None = None) -> None:
        """Refuse a request that is more than the tenant may run now; nothing is charged.

        Args:
            num_tokens: of its prompts.
            num_prompts: each counts as a request.
            charge: what it was charged before.

        Raises:
            ApiError: with the time after which there is room.
        """
        limits = self.limits
        if limits.max_concurrent is not None and self.num_requests >= limits.max_concurrent:
            raise self._limited(
                LIMITED_REQUESTS, "max_concurrent",
                f"{self.num_requests} requests of this API key are running, at most {limits.max_concurrent} "
                "are allowed",
                CONCURRENT_RETRY_S,
            )  # fmt: skip
        if limits.tokens_per_minute is not None and num_tokens > limits.tokens_per_minute:
            raise ApiError(
                BAD_REQUEST,
                f"the prompt has {num_tokens} tokens; the limit of this API key is {limits.tokens_per_minute} a minute",
                param="prompt", reason="tokens_per_minute",
            )  # fmt: skip
        if limits.requests_per_minute is not None and num_prompts > limits.requests_per_minute:
            raise ApiError(
                BAD_REQUEST,
                f"the request has {num_prompts} prompts, each of which counts as a request; the limit of "
                    f"this API key is {limits.requests_per_minute} per minute",
                param="prompt", reason="requests_per_minute",
            )  # fmt: skip
        num_requests = num_prompts if charge is None else 0
        num_new_tokens = num_tokens - (0 if charge is None else charge.num_tokens)
        wait_requests = self._requests.wait_s(num_requests) if self._requests is not None and num_requests else 0.0
        wait_tokens = 0.0 if self._tokens is None else self._tokens.wait_s(num_new_tokens)
        wait = max(wait_requests, wait_tokens)
        if not wait:
            return
        if wait_requests >= wait_tokens:
            kind, name, limit, used = LIMITED_REQUESTS, "requests", limits.requests_per_minute, num_requests
        else:
            kind, name, limit, used = LIMITED_TOKENS, "tokens", limits.tokens_per_minute, num_tokens
        raise self._limited(
            kind, f"{name}_per_minute",
            f"rate limit reached: the limit of this API key is {limit} {name} per minute, this request needs {used}; "
            f"try again in {duration(wait)}", wait,
        )  # fmt: skip

    def begin(self, num_tokens: int, num_prompts: int = 1) -> Charge:
        """Work on the prompts of a request begins: charge it.

        Args:
            num_tokens: that its prompts have at least.
            num_prompts: each counts as a request.

        Raises:
            ApiError: as `check`.
        """
        most = self.limits.tokens_per_minute
        self.check(num_tokens if most is None else min(num_tokens, most), num_prompts)
        if self._requests is not None:
            self._requests.take(num_prompts)
        self.charge(num_tokens)
        return Charge(self, num_tokens)

    def enter(self, num_answers: int, num_tokens: int, charge: Charge | None = None) -> None:
        """A request was admitted: charge it, or what is left to charge."""
        self._count(1, num_answers)
        if charge is not None:
            charge.correct(num_tokens)
            return
        if self._requests is not None:
            self._requests.take(1)
        self.charge(num_tokens)

    def charge(self, num_tokens: int) -> None:
        """Tokens were used."""
        if self._tokens is not None:
            self._tokens.take(num_tokens)

    def leave(self, num_answers: int) -> None:
        """A request has ended."""
        self._count(-1, -num_answers)

    def max_tokens(self, asked: int | None, default: int | None) -> int | None:
        """`max_tokens` of a request.

        Args:
            asked: by the request; None = left open.
            default: its value when it is left open; None = as many as fit.

        Raises:
            ApiError: more was asked for than the tenant may.
        """
        limit = self.limits.max_tokens
        if limit is None:
            return default
        if asked is not None and asked > limit:
            raise ApiError(
                BAD_REQUEST, f"max_tokens={asked} is more than the {limit} allowed for this API key",
                param="max_tokens", reason="max_tokens",
            )  # fmt: skip
        return limit if default is None else min(default, limit)

    def priority(self, asked: int | None) -> int:
        """Priority of a request that asked for `asked`; None = left open.

        Raises:
            ApiError: it is outside the range that is the tenant's.
        """
        limits = self.limits
        if asked is None:
            return limits.priority
        low, high = limits.min_priority, limits.max_priority
        if (low is not None and asked < low) or (high is not None and asked > high):
            raise ApiError(
                BAD_REQUEST,
                f"priority={asked} is outside of the range allowed for this API key: "
                f"{'any' if low is None else low} to {'any' if high is None else high}",
                param="priority", reason="priority",
            )  # fmt: skip
        return asked

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What an answer says of the limits."""
        return rate_headers(self._requests, self._tokens)

    def _count(self, num_requests: int, num_answers: int) -> None:
        self._num_requests += num_requests
        self._num_answers += num_answers

    def _limited(self, kind: ErrorKind, reason: str, message: str, retry_after_s: float) -> ApiError:
        return ApiError(kind, message, retry_after_s=retry_after_s, reason=reason)

    def _bucket(self, kind: int, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return self._new_bucket(kind, per_minute)
        bucket.resize(per_minute)
        return bucket

    def _new_bucket(self, kind: int, per_minute: int) -> Bucket:
        """A full one, of requests (0) or of tokens (1)."""
        return Bucket(per_minute, self._clock)


class Charge:
    """The tokens that a request was charged before they were counted.

    Args:
        tenant: whose it is.
        num_tokens: that were charged.
    """

    __slots__ = ("_tenant", "num_tokens")

    def __init__(self, tenant: Tenant, num_tokens: int) -> None:
        self._tenant = tenant
        self.num_tokens = num_tokens

    def correct(self, num_tokens: int) -> None:
        """Now they are counted."""
        self._tenant.charge(num_tokens - self.num_tokens)
        self.num_tokens = num_tokens


MakeTenant = Callable[[str, TenantLimits, Callable[[], float]], Tenant]


class Tenants:
    """All tenants of a server.

    Args:
        keys: as read.
        clock: seconds.
        make: a tenant, from its name, its limits and the clock.
    """

    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic, make: MakeTenant = Tenant) -> None:
        self._clock = clock
        self._make = make
        self._by_name: dict[str, Tenant] = {}
        self.anonymous = make(DEFAULT_TENANT, TenantLimits(operator=True), clock)
        self.replace(keys)

    @property
    def needs_key(self) -> bool:
        """True when requests must show a key."""
        return bool(self._keys)

    @property
    def has_several(self) -> bool:
        """True when there is something that one tenant must not learn of another."""
        return self._keys.num_tenants > 1

    def of(self, authorization: bytes) -> Tenant | None:
        """Whose an Authorization header is; None when its key is not valid."""
        found = self.find(authorization)
        return None if found is None else found[0]

    def find(self, authorization: bytes) -> tuple[Tenant, str] | None:
        """As `of`, and the fingerprint of the key."""
        found = self._keys.find(authorization)
        return None if found is None else (self._by_name[found[0]], found[1])

    def all(self) -> list[Tenant]:
        """Every tenant that has a key; of a server without keys, the one that all requests are of."""
        return list(self._by_name.values()) or [self.anonymous]

    def may_see_all(self, tenant: Tenant) -> bool:
        """True when `tenant` may read what is about the whole server: an operator may, and who is alone."""
        return tenant.is_operator or not self.has_several

    def replace(self, keys: ApiKeys) -> None:
        """Take other keys and limits; what tenants of the same name have used stays used."""
        tenants: dict[str, Tenant] = {}
        for name, limits in keys.limits.items():
            tenant = self._by_name.get(name)
            if tenant is None:
                tenant = self._make(name, limits, self._clock)
            else:
                tenant.set_limits(limits)
            tenants[name] = tenant
        self._keys, self._by_name = keys, tenants
