"""vLLM's `v1.engine.async_llm`: Quire's engine for event loops with the arguments that vLLM's has besides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from quire.compat.absent import absent_method
from quire.compat.vllm.features import POOLING
from quire.config import QuireConfig
from quire.config.model import ModelConfig
from quire.core.outputs import RequestOutput
from quire.core.request_options import RequestOptions
from quire.core.sampling_params import SamplingParams
from quire.engine import async_llm
from quire.engine.output_stream import OutputStream
from quire.errors import EngineDeadError, ValidationError, require_unset
from quire.tokenization.hf_tokenizer import HFTokenizer

__all__ = ["AsyncLLM"]

ADAPTERS = "LoRA adapters are not supported; merge the adapter into the weights"


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
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; arguments and errors as Quire's engine.

        `session_id` and `kv_hints` choose a replica and what is kept in vLLM; here prefixes do, so they are not needed.
        """
        require_unset(
            lora_request=lora_request, tokenization_kwargs=tokenization_kwargs, reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )  # fmt: skip
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

    def get_tokenizer(self) -> HFTokenizer | None:
        """The model's tokenizer, with the methods of Hugging Face's; None with skip_tokenizer_init."""
        return None if self.tokenizer is None else HFTokenizer(self.tokenizer, self.chat_template)

    @property
    def vllm_config(self) -> QuireConfig:
        """The resolved configuration."""
        return self.config

    @property
    def model_config(self) -> ModelConfig:
        """Settings of the model."""
        return self.config.model

    @property
    def is_running(self) -> bool:
        """True until the engine is of no further use."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """As `errored`."""
        return self.errored

    @property
    def dead_error(self) -> BaseException:
        """What is raised once the engine is of no further use."""
        return self._dead or EngineDeadError("the engine stopped", hint="create a new one")

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model is for: text."""
        return ("generate",)

    async def get_model_config(self) -> ModelConfig:
        """As `model_config`."""
        return self.config.model

    async def is_tracing_enabled(self) -> bool:
        """False: traces are a server's."""
        return False

    async def start_profile(self, prefix: str | None = None) -> None:
        """As `LLM.start_profile`."""
        if self.config.observability.profiler is None:
            raise ValidationError("profiles have no directory", hint="set profile='DIR'", field="profile")
        if not await self.profile(True):
            raise ValidationError("a profile is being taken", hint="end it with stop_profile()", field="profile")

    async def stop_profile(self) -> None:
        """Write the profile."""
        await self.profile(False)

    async def reset_mm_cache(self) -> None:
        """Do nothing: there are no images, so no cache of them."""

    async def reset_encoder_cache(self) -> None:
        """Do nothing: there are no encoders, so no cache of what they made."""

    async def do_log_stats(self) -> None:
        """Log now what was counted since the last line of statistics; nothing with disable_log_stats."""
        if self._logs is not None:
            self._logs.flush()

    async def list_loras(self) -> set[int]:
        """No adapter is loaded."""
        return set()

    add_lora = absent_method("AsyncLLM", "add_lora", ADAPTERS)
    remove_lora = absent_method("AsyncLLM", "remove_lora", ADAPTERS)
    pin_lora = absent_method("AsyncLLM", "pin_lora", ADAPTERS)
    encode = absent_method("AsyncLLM", "encode", f"Quire does not support {POOLING} yet")
    release_kv_cache_memory = absent_method("AsyncLLM", "release_kv_cache_memory", "use sleep()")
    scale_elastic_ep = absent_method("AsyncLLM", "scale_elastic_ep", "a server has POST /scale_elastic_ep")

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine core; harmless when repeated."""
        super().shutdown()
