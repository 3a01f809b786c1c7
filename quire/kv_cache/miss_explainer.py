"""MissExplainer: why the cached prefix of a request ends where it does. Owned by the KV cache manager.

Asked once for each admission; the work is bounded, whatever is cached: some lookups and at most
`MAX_SIBLINGS` blocks compared, and after a reset one walk along the prompt. Only `operator_reason` depends on
blocks with other extra keys (salts, tenants).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.core.cache_info import CacheMiss, MissReason
from quire.core.cache_salt import tenant_part
from quire.core.request import ExtraKeys, Request
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.prefix_index import PrefixIndex

MAX_SIBLINGS = 64
MAX_EXTRA_KEYS = 16


@dataclass(frozen=True, slots=True)
class _MissingBlock:
    """The first block of a request that was not found; `node` is the prefix that ends with it, if it is known."""

    number: int
    parent: int
    tokens: bytes
    extra_keys: ExtraKeys
    node: int | None


IsComputing = Callable[[int, int, bytes, ExtraKeys], bool]
"""(node, block number, its tokens, its extra keys): whether a running request is about to publish it after the node."""


class MissExplainer:
    """Explains misses by what follows the found prefix in the tree.

    Args:
        index: the cached blocks.
        block_size: tokens per block.
        is_computing: knows what running requests are about to publish.
    """

    def __init__(self, index: PrefixIndex, block_size: int, is_computing: IsComputing) -> None:
        self._index = index
        self._tree = index.tree
        self._block_size = block_size
        self._is_computing = is_computing

    def explain(self, request: Request, prefix: CachedPrefix) -> CacheMiss | None:
        """Why no more than this prefix of `request` was found; None when all that can be used was."""
        block, num_usable = prefix.num_tokens // self._block_size, (len(request.token_ids) - 1) // self._block_size
        end, parent = block * self._block_size, prefix.node
        if parent is None or prefix.num_unpublished:
            return None  # blocks of a sibling that runs, or from outside
        if prefix.num_common_tokens > prefix.num_tokens:
            return self._explain_state(request, block, prefix.num_common_tokens // self._block_size)
        missing = self._missing_block(request, block, parent)
        if block == num_usable:
            if missing is not None and missing.node is not None and self._index.holds(missing.node):
                return CacheMiss(MissReason.LAST_TOKEN, end)
            return CacheMiss(MissReason.BELOW_ONE_PAGE, 0) if not num_usable else None
        if missing is None:
            return None
        reason = self._known_reason(request, missing)
        if reason is not None:
            return CacheMiss(reason, end)
        nearest = self._nearest_sibling(request, missing)
        reason, position = nearest if nearest is not None else (MissReason.COLD, end)
        return CacheMiss(reason, position, self._foreign_reason(missing))

    def _explain_state(self, request: Request, num_found: int, num_common: int) -> CacheMiss:
        """Why no recurrent state lay behind the found blocks, where blocks of other layers do, up to `num_common`."""
        nodes = self._tree.walk(request.block_tokens, request.extra_keys, num_common)
        for block in range(num_common, num_found, -1):
            if self._index.past_states.reason(nodes[block - 1]) is not None:
                return CacheMiss(MissReason.EVICTED, block * self._block_size)
        missing = self._missing_block(request, num_common, nodes[-1])
        reason = MissReason.NO_CHECKPOINT
        if missing and self._is_computing(missing.parent, missing.number, missing.tokens, missing.extra_keys):
            reason = MissReason.STILL_COMPUTING
        return CacheMiss(reason, num_common * self._block_size)

    def _missing_block(self, request: Request, block: int, parent: int) -> _MissingBlock | None:
        """The first block that was not found; None when the prompt has no such full block, so it was never computed."""
        if block >= request.num_prompt_tokens // self._block_size:
            return None
        tokens, extra_keys = request.block_tokens[block], request.extra_keys.get(block, ())
        return _MissingBlock(block, parent, tokens, extra_keys, self._tree.child(parent, tokens, extra_keys))

    def _known_reason(self, request: Request, missing: _MissingBlock) -> MissReason | None:
        """What is known of the very block that is missing."""
        if self._is_computing(missing.parent, missing.number, missing.tokens, missing.extra_keys):
            return MissReason.STILL_COMPUTING
        if missing.node is not None:  # it was there; or it is, but blocks of other groups are not
            return self._index.past.reason(missing.node) or MissReason.EVICTED
        blocks, extra_keys = request.block_tokens, request.extra_keys
        is_known = self._tree.was_known_before_reset(blocks, extra_keys, missing.number + 1)
        return MissReason.CACHE_RESET if is_known else None

    def _nearest_sibling(self, request: Request, missing: _MissingBlock) -> tuple[MissReason, int] | None:
        """Of cached blocks after the same prefix, with the same extra keys, the one that agrees longest."""
        start = missing.number * self._block_size
        siblings = self._index.holding(self._tree.siblings.after(missing.parent, missing.extra_keys, MAX_SIBLINGS))
        if not siblings:
            return None
        num_equal = _num_equal(self._tree.tokens_of(siblings), missing.tokens)
        longest = int(num_equal.max())
        if not longest and not start:
            return None  # they have nothing in common
        nearest = itertools.compress(siblings, num_equal == longest)
        own_id = request.message.template_id
        template_ids = {self._tree.template_ids.get(node, 0) for node in nearest} if own_id else {0}
        is_other_template = 0 not in template_ids and own_id not in template_ids
        reason = MissReason.TEMPLATE_CHANGED if is_other_template else MissReason.DIFFERENT_TOKEN
        return reason, start + longest

    def _foreign_reason(self, missing: _MissingBlock) -> MissReason | None:
        """Whether the missing block is cached with other extra keys, and with which kind."""
        own_keys, tree = missing.extra_keys, self._tree
        known = [
            keys for keys in tree.salted.keys_of(missing.parent, missing.tokens, MAX_EXTRA_KEYS) if keys != own_keys
        ]
        if own_keys:
            known.append(())
        nodes = [(keys, tree.child(missing.parent, missing.tokens, keys)) for keys in known]
        found = [keys for keys, node in nodes if node is not None and self._index.holds(node)]
        return min((_difference(dict(own_keys), dict(keys)) for keys in found), default=None)


def _num_equal(blocks: list[bytes], other: bytes) -> np.ndarray:
    """[num_pages]: how many leading tokens each of these blocks, which differ from `other`, has in common with it."""
    block_tokens = np.frombuffer(b"".join(blocks), dtype="<i4").reshape(len(blocks), -1)
    first: np.ndarray = (block_tokens != np.frombuffer(other, dtype="<i4")).argmax(axis=1)
    return first


def _difference(own_keys: dict[str, str], other_keys: dict[str, str]) -> MissReason:
    """What differs between the extra keys of two blocks of the same tokens."""
    own_salt, other_salt = own_keys.get("cache_salt", ""), other_keys.get("cache_salt", "")
    if own_salt == other_salt:
        return MissReason.ADAPTER
    return MissReason.OTHER_SALT if tenant_part(own_salt) == tenant_part(other_salt) else MissReason.OTHER_TENANT
