"""Checkpoints: at how many tokens the recurrent state of a request is kept, so that others can begin there.

Asked by the KV cache manager. Pure functions of a request. A state can only be found at the end of a full block, and a
step that ends there leaves it, so prompts are cut at borders:

- the last full block of the tokens that are there, at least one token before their end: the same prompt comes again, or
  a preempted request goes on;
- the end of what the request has in common with earlier ones, where no state was kept: a third one will begin there
  (Pan et al. 2024, "Marconi: Prefix Caching for the Era of Hybrid LLMs", section 4.1);
- the end of a beginning that is declared to be shared (`num_shared_tokens`);
- every `prefix_cache_retention_interval` tokens, if that is set.

Each cut costs a step, so the first three are left out where they are close behind the state that the request began
with. While a request decodes every full block is a border, which is free: see `single_type.state`.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.request import Request

MIN_BLOCKS = 4
"""Blocks that a state has to save: a step for fewer costs more than they do."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The borders.

    Attributes:
        block_size: tokens per block.
        interval: tokens; 0 = there are no regular borders.
    """

    block_size: int
    interval: int = 0

    def next_border(self, request: Request, start: int, num_tokens: int) -> int:
        """The first border after `start` of a request of `num_tokens` tokens; `num_tokens` = there is none."""
        if request.message.sampling_params.no_store:
            return num_tokens
        borders = (one for one in self._borders(request, start, num_tokens) if start < one < num_tokens)
        return min(borders, default=num_tokens)

    def is_border(self, request: Request, position: int, num_tokens: int) -> bool:
        """Whether the state after `position` of its `num_tokens` tokens is kept, though it does not decode."""
        return position in self._borders(request, position - 1, num_tokens)

    def _borders(self, request: Request, start: int, num_tokens: int) -> list[int]:
        size, num_prompt = self.block_size, request.num_prompt_tokens
        num_shared = min(request.message.num_shared_tokens, num_prompt)
        ends = (num_tokens - 1, num_prompt - 1, num_shared, request.num_common_tokens)
        least = request.num_found_tokens + MIN_BLOCKS * size
        borders = [end // size * size for end in ends if end >= least]
        if self.interval:
            every = max(1, self.interval // size) * size
            borders.append((start // every + 1) * every)
        return borders
