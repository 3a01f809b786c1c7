"""vLLM's `logprobs`."""

from __future__ import annotations

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import FLAT_LOGPROBS
from quire.core.outputs import Logprob

__all__ = ["Logprob"]

__getattr__ = module_getattr(__name__, absent_names={"FlatLogprobs": FLAT_LOGPROBS})
