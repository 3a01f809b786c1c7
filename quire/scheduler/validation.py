"""Which requests are refused on arrival: those that could never run to their end, even alone.

Called by the scheduler. Pure functions; a refusal names the fix.
"""

from __future__ import annotations

import numpy as np

from quire.core.engine_messages import EngineCoreRequest
from quire.errors import ValidationError
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.limits import Limits
from quire.scheduler.request_table import max_total_tokens


def check_can_run(message: EngineCoreRequest, limits: Limits, kv: KVCacheManager) -> None:
    """Refuse a request that could never run to its end.

    Raises:
        ValidationError: the prompt is empty or too long, prompt and output exceed the whole KV cache, or the request is
            of a beam search whose beams cannot run together.
    """
    max_model_len, num_prompt_tokens = limits.max_model_len, len(message.prompt_token_ids)
    if num_prompt_tokens == 0:
        raise ValidationError("the prompt is empty", hint="give at least one token", field="prompt")
    if num_prompt_tokens >= max_model_len:
        raise ValidationError(
            f"the prompt has {num_prompt_tokens} tokens; with max_model_len={max_model_len} it may have at most "
            f"{max_model_len - 1}, so that one can be generated",
            hint="shorten the prompt, or raise max_model_len",
            field="prompt",
        )
    num_total = max_total_tokens(num_prompt_tokens, message.sampling_params.max_tokens, max_model_len)
    num_output_tokens = 0 if message.output_token_ids is None else len(message.output_token_ids)
    if num_prompt_tokens + num_output_tokens >= num_total:
        raise ValidationError(
            f"the request has generated {num_output_tokens} tokens already and may have at most "
            f"{num_total - num_prompt_tokens}",
            hint="raise max_tokens",
            field="max_tokens",
        )
    if num_total > kv.max_tokens_per_request:
        raise _exceeds_cache(num_prompt_tokens, num_total, kv)
    check_beams_fit(message, limits, kv)


def max_total_tokens_of(message: EngineCoreRequest, max_model_len: int) -> int:
    """Prompt and output tokens at which a request ends."""
    return max_total_tokens(len(message.prompt_token_ids), message.sampling_params.max_tokens, max_model_len)


def check_beams_fit(message: EngineCoreRequest, limits: Limits, kv: KVCacheManager) -> None:
    """Refuse a beam search that could never run, as its beams must run together and share only the prompt for sure.

    Raises:
        ValidationError: there are fewer rows than beams, or tokens of a step than rows, or too few blocks.
    """
    spec = message.sampling_params.beam_search
    if spec is None:
        return
    if not kv.can_take_back:
        raise ValidationError(
            "beam search is not supported for models with recurrent layers, whose states cannot be taken back",
            hint="use n instead",
            field="beam_width",
        )
    if spec.num_beams > limits.max_num_seqs:
        raise ValidationError(
            f"beam_width={spec.num_beams} is more than max_num_seqs={limits.max_num_seqs}, but all beams must "
            "run together",
            hint="use fewer beams, or raise max_num_seqs",
            field="beam_width",
        )
    if limits.max_num_batched_tokens < limits.max_num_seqs:
        raise ValidationError(
            f"beams must run together, but with max_num_batched_tokens={limits.max_num_batched_tokens} not all of "
            f"max_num_seqs={limits.max_num_seqs} requests run in one step",
            hint="raise max_num_batched_tokens, or lower max_num_seqs",
            field="beam_width",
        )
    num_shared = np.array(kv.num_blocks_shared(len(message.prompt_token_ids) - 1))
    num_held = kv.num_blocks_held(np.array(max_total_tokens_of(message, limits.max_model_len)))
    num_needed = num_shared + spec.num_beams * (num_held - num_shared)
    if (num_needed > kv.usable_counts).any():
        raise ValidationError(
            f"{spec.num_beams} beams may need {num_needed.sum()} blocks of {kv.block_size} tokens; the whole KV cache "
            f"has {kv.num_usable_blocks}",
            hint="use fewer beams or a smaller max_tokens, or enlarge the KV cache (num_gpu_blocks_override, "
            "kv_cache_memory_bytes or gpu_memory_utilization)",
            field="beam_width",
        )


def _exceeds_cache(num_prompt_tokens: int, num_total: int, kv: KVCacheManager) -> ValidationError:
    room = kv.max_tokens_per_request - num_prompt_tokens
    more = "enlarge the KV cache (num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization)"
    return ValidationError(
        f"the request may grow to {num_total} tokens ({num_prompt_tokens} of prompt, "
        f"{num_total - num_prompt_tokens} of output); the whole KV cache holds one of at most "
        f"{kv.max_tokens_per_request} ({kv.num_usable_blocks} blocks of {kv.block_size} tokens)",
        hint=f"use max_tokens <= {room}, or {more}" if room > 0 else f"shorten the prompt, or {more}",
        field="max_tokens" if room > 0 else "prompt",
    )
