"""Which requests are refused on arrival: those that could never run to their end, even alone.

Called by the scheduler. Pure functions; a refusal names the fix.
"""

from __future__ import annotations

from quire.core.engine_messages import EngineCoreRequest
from quire.errors import ValidationError
from quire.kv_cache.manager import KVCacheManager
from quire.scheduler.request_table import max_total_tokens


def check_can_run(message: EngineCoreRequest, max_model_len: int, kv: KVCacheManager) -> None:
    """Refuse a request that could never run to its end.

    Raises:
        ValidationError: the prompt is empty or too long, or prompt and output exceed the whole KV cache.
    """
    num_prompt_tokens = len(message.prompt_token_ids)
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
            f"the request has put out {num_output_tokens} tokens already and may have at most "
            f"{num_total - num_prompt_tokens}",
            hint="raise max_tokens",
            field="max_tokens",
        )
    if num_total > kv.max_tokens_per_request:
        raise _exceeds_cache(num_prompt_tokens, num_total, kv)


def _exceeds_cache(num_prompt_tokens: int, num_total: int, kv: KVCacheManager) -> ValidationError:
    room = kv.max_tokens_per_request - num_prompt_tokens
    more = "enlarge the KV cache (num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization)"
    return ValidationError(
        f"the request may grow to {num_total} tokens ({num_prompt_tokens} of prompt, "
        f"{num_total - num_prompt_tokens} of output); the whole KV cache holds one of at most "
        f"{kv.max_tokens_per_request} ({kv.num_usable_blocks} pages of {kv.block_size} tokens)",
        hint=f"use max_tokens <= {room}, or {more}" if room > 0 else f"shorten the prompt, or {more}",
        field="max_tokens" if room > 0 else "prompt",
    )
