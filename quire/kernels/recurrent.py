"""RecurrentBatch: whose tokens the rows of a step are, and where each request's recurrent state lies.

Made by recurrent layers, read by the native kernels and their references.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RecurrentBatch:
    """The requests of a step, for layers whose state is one block per request.

    Attributes:
        query_start_loc: [num_reqs + 1] int32; request i owns rows query_start_loc[i] .. query_start_loc[i + 1] - 1.
        read_blocks: [num_reqs] int32; the block of the state before the step; -1 = that state is zero.
        write_blocks: [num_reqs] int32; the block of the state after the step, which may be the same. No block that one
            request writes is read or written by another.
        token_blocks: [num_tokens] int32; a block where the state after each token is left, too, so that the request can
            be taken back to it; -1 = nowhere, as after a request's last token. Distinct, and none of the blocks above.
            None = nowhere.
    """

    query_start_loc: torch.Tensor
    read_blocks: torch.Tensor
    write_blocks: torch.Tensor
    token_blocks: torch.Tensor | None = None
