"""vLLM's `v1.engine.async_llm`: Quire's engine for event loops with the arguments that vLLM's has besides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from quire.config import QuireConfig
from quire.core.outputs import RequestOutput
from quire.core.request_options import RequestOptions
from quire.core.sampling_params import SamplingParams
from quire.engine import async_llm
from quire.engine.output_stream import OutputStream
from quire.errors import require_unset

__all__ = ["AsyncLLM"]


class RequestStream:
    """The outputs of one request; ends after the last."""

    def __init__(self, stream: OutputStream) -> None:
        self._stream = stream

    async def get(self) -> RequestOutput:
        """The next output."""
        return await self._stream.get()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        try:
            finished = False
            while not finished:
                output = await self._stream.get()
                finished = output.finished
                yield output
        finally:
            self._stream.close()


class AsyncLLM(async_llm.AsyncLLM):
    """An engine for many concurrent requests, its core in another process."""

    @classmethod
    def from_engine_args(  # type: ignore[override]
        cls, engine_args: Mapping[str, Any], start_engine_loop: bool = True, usage_context: Any = None,
        stat_loggers: Any = None, **options: Any,
    ) -> AsyncLLM:  # fmt: skip
        """The engine that `engine_args` describe; waits until it is ready."""
        require_unset(stat_loggers=stat_loggers)
        engine: AsyncLLM = super().from_engine_args(engine_args, **options)  # type: ignore[assignment]
        return engine

    @classmethod
    def from_vllm_config(cls, vllm_config: QuireConfig, **_: Any) -> AsyncLLM:
        """The engine that a configuration (`EngineArgs.create_engine_config`) describes."""
        engine: AsyncLLM = super().from_engine_args(vllm_config)  # type: ignore[assignment]
        return engine

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        data_parallel_rank: int | None = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; arguments and errors as Quire's engine."""
        require_unset(lora_request=lora_request, tokenization_kwargs=tokenization_kwargs)
        return super().generate(prompt, sampling_params, request_id, data_parallel_rank=data_parallel_rank, **others)

    async def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, arrival_time: float | None = None, **others: Any
    ) -> RequestStream:
        """Begin a request; iterate over what is returned for its outputs."""
        return RequestStream(await self.open_stream(prompt, params, request_id, RequestOptions(**others)))

    async def abort(self, request_id: Any, internal: bool = False) -> None:
        """End one request or several."""
        await super().abort(request_id)

    async def pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop running steps until `resume_generation`; arguments and errors as Quire's engine."""
        await super().pause_generation(mode, clear_cache)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.tokenizer

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine core; harmless when repeated."""
        super().shutdown()
