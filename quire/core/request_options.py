"""RequestOptions: how the engine treats a request, beside its prompt and its sampling parameters.

Made by `LLM`, the engines and the server from their callers' arguments; passed as one value to the front end, which
checks it and copies it into `EngineCoreRequest`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.tenancy import NO_TENANT, TenantShare


@dataclass(frozen=True, slots=True)
class Resumed:
    """How far an answer was on another replica: its tokens, and the key of its random numbers."""

    output_token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of one request; checked by `FrontEnd.prepare`.

    Attributes:
        priority: lower runs first, where the scheduling policy looks at it.
        tenant: whose it is, for scheduling_policy="fair".
        queue_timeout: seconds that it may wait without ever running; 0 = any, None = as the settings say.
        cache_salt: requests share cached blocks only with requests of the same salt; None = that of the prompt, if any.
        add_special_tokens: write what the tokenizer puts around a text.
        resumed: the answer goes on from a snapshot (`core.request_snapshot`); None = it begins.
        data_parallel_rank: the replica that runs it, as long as that is there; None = the best.
    """

    priority: int = 0
    tenant: TenantShare = NO_TENANT
    queue_timeout: float | None = None
    cache_salt: str | None = None
    add_special_tokens: bool = True
    data_parallel_rank: int | None = None
    resumed: Resumed | None = None


DEFAULT_OPTIONS = RequestOptions()
