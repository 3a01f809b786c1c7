"""vLLM's `outputs`."""

from __future__ import annotations

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import POOLING
from quire.core.outputs import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]

__getattr__ = module_getattr(
    __name__,
    absent_names={
        "PoolingOutput": POOLING,
        "PoolingRequestOutput": POOLING,
        "EmbeddingOutput": POOLING,
        "EmbeddingRequestOutput": POOLING,
        "ClassificationOutput": POOLING,
        "ClassificationRequestOutput": POOLING,
        "ScoringOutput": POOLING,
        "ScoringRequestOutput": POOLING,
    },
)
