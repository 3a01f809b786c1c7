"""What layers need to know of a step: where its queries are, and in which blocks keys, values and states live.

Built once per step and KV cache group by the worker (`worker.attention_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """One KV cache group's view of a step.

    Attributes:
        num_reqs: requests in the step.
        num_tokens: scheduled tokens in the step, unpadded; request i owns tokens
            query_start_loc[i] .. query_start_loc[i + 1] - 1.
        query_start_loc: [num_reqs + 1] int32.
        seq_lens: [num_reqs] int32; tokens in the cache after this step's were written.
        block_table: [num_reqs, max_blocks_per_req] int32; block of each block of tokens, 0 beyond the end.
        slot_mapping: [num_tokens] int64; where each token's key and value go: block * block_size + offset.
        query_start_loc_np, seq_lens_np: the same values on the host.
        max_query_len, max_seq_len: in tokens.
        copied_slots: [2, num_copies] int64; from and to: what is copied between this step's writes and its attention,
            so that each path of a tree of drafts lies at contiguous positions. None = nothing is.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_np: np.ndarray
    seq_lens_np: np.ndarray
    max_query_len: int
    max_seq_len: int
    copied_slots: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMetadata:
    """A step as layers with a recurrent state see it, see `layers.recurrent_state`.

    A request goes on from the state in its `read_block` and leaves the state after its last token of the step in its
    `write_block`. The two are equal while it decodes; they differ where the state that it read is kept for other
    requests, so a layer must not assume either. No block is written by two requests, and none is read by one and
    written by another.

    Example: request 0 begins anew, 1 goes on from a kept checkpoint, 2 decodes:

        read_block  [-1, 7, 3]
        write_block [ 4, 5, 3]

    Attributes:
        num_reqs, num_tokens, query_start_loc: as in `AttentionMetadata`.
        num_computed_tokens: [num_reqs] int32; position of each request's first token of the step: the state that it
            reads is that after so many tokens.
        read_block: [num_reqs] int32; -1 = the request begins anew, at position 0, with a state of zeros.
        write_block: [num_reqs] int32, distinct.
        token_block: [num_tokens] int32; where the state after each token is left, too; -1 = nowhere. Distinct blocks,
            which no request reads or has in `write_block`. None = nowhere, as in steps without drafts.
        query_start_loc_np, num_computed_tokens_np, read_block_np, write_block_np: the same values on the host.
        max_query_len: in tokens; 1 = every request computes one token.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: torch.Tensor
    num_computed_tokens: torch.Tensor
    read_block: torch.Tensor
    write_block: torch.Tensor
    query_start_loc_np: np.ndarray
    num_computed_tokens_np: np.ndarray
    read_block_np: np.ndarray
    write_block_np: np.ndarray
    max_query_len: int
    token_block: torch.Tensor | None = None
