"""Where this step's queries are and which blocks their keys live in. Built once per step by the worker."""

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
