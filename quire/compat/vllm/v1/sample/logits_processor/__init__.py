"""vLLM's `v1.sample.logits_processor`: processors written for vLLM run over Quire as they are."""

from __future__ import annotations

from quire.compat.vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    ProcessorConfig,
)
from quire.compat.vllm.v1.sample.logits_processor.per_request import AdapterLogitsProcessor, RequestLogitsProcessor

__all__ = [
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "ProcessorConfig",
    "RequestLogitsProcessor",
]
