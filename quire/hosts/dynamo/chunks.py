"""From an output of this engine to the chunks that Dynamo's front end reads. Pure functions; no import of `dynamo`."""

from __future__ import annotations

from typing import Any

from quire.core.outputs import CompletionOutput, Logprob, RequestOutput

# Names of ends in Dynamo; what has none is an error.
FINISH_REASONS = {"stop": "stop", "length": "length", "abort": "cancelled", "repetition": "stop"}


class ChunkMaker:
    """Chunks of one request; counts its tokens.

    Args:
        is_prefill: the request is decoded elsewhere, so its end says "length" and how to find its blocks.
    """

    def __init__(self, *, is_prefill: bool = False) -> None:
        self._is_prefill = is_prefill
        self._num_tokens = 0
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None

    def chunks(self, output: RequestOutput) -> list[dict[str, Any]]:
        """What is new, one chunk for each sequence; usage is in the last chunk of all."""
        self._num_tokens += sum(len(one.token_ids) for one in output.outputs)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = [None if line is None else _prompt_line(line) for line in output.prompt_logprobs]
        chunks = [_chunk(one) for one in output.outputs if one.token_ids or one.finish_reason is not None]
        if output.finished and chunks:
            self._end(chunks[-1], output)
        return chunks

    def _end(self, chunk: dict[str, Any], output: RequestOutput) -> None:
        num_prompt = len(output.prompt_token_ids)
        chunk["completion_usage"] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
        }
        if self._prompt_logprobs is not None:
            chunk["engine_data"] = {"prompt_logprobs": self._prompt_logprobs}
        if self._is_prefill and chunk["finish_reason"] in ("stop", "length"):
            chunk["finish_reason"] = "length"  # "stop" would end the request without a decode worker
            chunk["disaggregated_params"] = {"kv_transfer_params": output.kv_transfer_params}


def _chunk(one: CompletionOutput) -> dict[str, Any]:
    chunk: dict[str, Any] = {"token_ids": one.token_ids, "index": one.index}
    if one.logprobs:
        sampled = zip(one.token_ids, one.logprobs, strict=True)
        chunk["log_probs"] = [line[token_id].logprob for token_id, line in sampled]
        chunk["top_logprobs"] = [[_entry(token_id, of) for token_id, of in line.items()] for line in one.logprobs]
    if one.finish_reason is not None:
        chunk["finish_reason"] = FINISH_REASONS.get(one.finish_reason, "error")
    return chunk


def _entry(token_id: int, of: Logprob) -> dict[str, Any]:
    text = of.decoded_token
    data = None if text is None else list(text.encode("utf-8", "surrogateescape"))
    return {"rank": of.rank or 0, "token_id": token_id, "token": text, "logprob": of.logprob, "bytes": data}


def _prompt_line(line: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": of.logprob, "rank": of.rank or 0, "decoded_token": of.decoded_token}
        for token_id, of in line.items()
    }
