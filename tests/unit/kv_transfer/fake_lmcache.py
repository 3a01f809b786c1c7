"""What LMCache's adapters for engines do, as `LMCacheMPConnector` uses them: a server in this process.

As the real ones (0.5.6): whole chunks, found by model, salt and all tokens before their end; a lookup locks what it
finds, and a retrieve needs and releases that lock; no '@' in a model's name; a session is of one request for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

CHUNK_SIZE = 32
Key = tuple[str, str, tuple[int, ...]]


@dataclass
class FakeServer:
    """What it keeps, and how often each chunk is locked."""

    kept: dict[Key, torch.Tensor] = field(default_factory=dict)
    locks: Counter[Key] = field(default_factory=Counter)
    sessions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    is_up: bool = True
    is_answering: bool = True

    def module(self) -> Any:
        """Stands for `lmcache.integration.vllm.vllm_multi_process_adapter`."""
        return SimpleNamespace(
            LMCacheMPSchedulerAdapter=lambda urls, **common: FakeScheduler(self, **common),
            LMCacheMPWorkerAdapter=lambda url, **common: FakeWorker(self, **common),
            ParallelStrategy=dict, EngineGroupInfo=lambda *fields: fields, LoadStoreOp=FakeOperation,
        )  # fmt: skip

    def keys(self, model: str, salt: str, session: str, token_ids: Sequence[int], start: int, end: int) -> list[Key]:
        """Of the chunks from one token to another."""
        assert start % CHUNK_SIZE == 0 == end % CHUNK_SIZE and end <= len(token_ids)
        known = self.sessions.setdefault(session, ())
        assert tuple(token_ids[: len(known)]) == known[: len(token_ids)], "a session is of one request"
        self.sessions[session] = max(known, tuple(token_ids), key=len)
        return [
            (model, salt, tuple(token_ids[: i + CHUNK_SIZE])) for i in range(start, end, CHUNK_SIZE)
        ]  # fmt: skip


@dataclass
class FakeOperation:
    token_ids: list[int]
    block_ids: list[list[int]]
    start: int
    end: int


class FakeAdapter:
    lmcache_tokens_per_chunk = CHUNK_SIZE

    def __init__(
        self, server: FakeServer, *, context: Any, model_name: str, vllm_block_size: int, parallel_strategy: Any,
        extra_config: dict[str, Any],
    ) -> None:  # fmt: skip
        assert "@" not in model_name and all(key.startswith("lmcache.mp.") for key in extra_config)
        if not server.is_up:
            raise ConnectionError("no answer")
        if CHUNK_SIZE % vllm_block_size:
            raise ValueError(f"LMCache chunk size {CHUNK_SIZE} must be a multiple of {vllm_block_size}")
        self.server, self.model, self.is_open = server, model_name, True

    @property
    def is_healthy(self) -> bool:
        return self.server.is_up

    def shutdown(self) -> None:
        assert self.is_open, "it is closed once"
        self.is_open = False


class FakeScheduler(FakeAdapter):
    def __init__(self, server: FakeServer, **common: Any) -> None:
        super().__init__(server, **common)
        self.found: dict[str, int] = {}
        self.polled: Counter[str] = Counter()

    def maybe_submit_lookup_request(self, session: str, token_ids: list[int], cache_salt: str = "") -> None:
        if not self.is_healthy or session in self.found:
            return
        end = len(token_ids) // CHUNK_SIZE * CHUNK_SIZE
        keys = self.server.keys(self.model, cache_salt, session, token_ids, 0, end)
        num = next((i for i, key in enumerate(keys) if key not in self.server.kept), len(keys))
        self.server.locks.update(keys[:num])
        self.found[session] = num * CHUNK_SIZE

    def check_lookup_result(self, session: str) -> int | None:
        self.polled[session] += 1
        return None if session in self.found and self.polled[session] == 1 else self.found.get(session, 0)

    def free_lookup_locks(
        self, token_ids: list[int], start: int, end: int, session: str, cache_salt: str = ""
    ) -> None:  # fmt: skip
        if self.is_healthy:
            self.server.locks.subtract(self.server.keys(self.model, cache_salt, session, token_ids, start, end))

    def cleanup_lookup_result(self, session: str) -> None:
        self.found.pop(session, None)

    def end_session(self, session: str) -> None:
        self.server.ended.append(session)


class FakeWorker(FakeAdapter):
    def __init__(self, server: FakeServer, **common: Any) -> None:
        super().__init__(server, **common)
        self.store_futures: dict[str, Future[bool]] = {}
        self.retrieve_futures: dict[str, tuple[Future[bool], list[int]]] = {}
        self.store_events: dict[str, object] = {}
        self.retrieve_events: dict[str, object] = {}
        self.errors: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], groups: Any, hints: dict[str, str]) -> None:
        ((_, self.tensor),) = kv_caches.items()
        assert groups == [(0, (0,), self.tensor.shape[1])] and hints == {"kv_layout": "NHD"}

    def create_recorded_event(self) -> object:
        return object()

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self.errors = self.errors, set()
        return errors

    def submit_store_request(self, session: str, op: FakeOperation, event: object, cache_salt: str = "") -> None:
        for key, slots in self._chunks(session, op, cache_salt):
            self.server.kept.setdefault(key, self.tensor[slots].clone())
        self.store_futures[session], self.store_events[session] = self._answer(True), event

    def submit_retrieve_request(self, session: str, op: FakeOperation, event: object, cache_salt: str = "") -> None:
        is_whole = True
        for key, slots in self._chunks(session, op, cache_salt):
            is_whole = is_whole and key in self.server.kept and self.server.locks[key] > 0
            self.server.locks[key] -= 1
            if is_whole:
                self.tensor[slots] = self.server.kept[key]
        self.retrieve_futures[session] = self._answer(is_whole), op.block_ids[0]
        self.retrieve_events[session] = event

    def _chunks(self, session: str, op: FakeOperation, salt: str) -> Iterator[tuple[Key, list[int]]]:
        keys = self.server.keys(self.model, salt, session, op.token_ids, op.start, op.end)
        per_chunk = len(op.block_ids[0]) // len(keys)
        return ((key, op.block_ids[0][i * per_chunk :][:per_chunk]) for i, key in enumerate(keys))

    def _answer(self, result: bool) -> Future[bool]:
        future: Future[bool] = Future()
        if self.server.is_answering:
            future.set_result(result)
        return future
