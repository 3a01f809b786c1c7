"""PlacedPrefixes: which beginnings of prompts each replica was given, so that a prompt meets its cached blocks.

Owned by `Placement`. A beginning is named by a hash over chunks of tokens, each with the hash before it; what a replica
was given longest ago is forgotten once its cache could not hold more. No message from the replicas is needed, and a
replica that forgot blocks early costs a cache miss, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from quire.core.engine_messages import EngineCoreRequest

CHUNK_TOKENS = 64
MAX_CHUNKS = 1024
"""Beginnings that agree in so many chunks are one: what comes behind would decide nothing."""


class PlacedPrefixes:
    """The beginnings that one replica was given.

    Args:
        capacity_tokens: tokens that its KV cache holds.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._most = max(1, capacity_tokens // CHUNK_TOKENS)
        self._keys: OrderedDict[int, None] = OrderedDict()

    def num_tokens(self, keys: list[int]) -> int:
        """Tokens at the beginning of a prompt, whose chunks have these keys, that the replica was given before."""
        known = self._keys
        count = 0
        for key in keys:
            if key not in known:
                break
            count += 1
        return count * CHUNK_TOKENS

    def add(self, keys: list[int]) -> None:
        """The replica is given a prompt: its first chunks are the last that will be forgotten."""
        known = self._keys
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._most:
            known.popitem(last=False)

    def clear(self) -> None:
        """The replica's cache is empty."""
        self._keys.clear()


def chunk_keys(request: EngineCoreRequest) -> list[int]:
    """A number for each whole chunk of the prompt, that depends on all tokens before its end and on the cache salt."""
    data = np.ascontiguousarray(request.prompt_token_ids, dtype=np.int32).tobytes()
    salt = request.cache_salt
    is_salted = salt is None  # nothing is left to mix in
    size = 4 * CHUNK_TOKENS
    keys, key = list[int](), 0
    for end in range(size, min(len(data), MAX_CHUNKS * size) + 1, size):
        if not is_salted and end // 4 > request.num_shared_tokens:
            key, is_salted = hash((key, salt)), True
        key = hash((key, data[end - size : end]))
        keys.append(key)
    return keys
