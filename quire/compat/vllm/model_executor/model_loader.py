"""vLLM's `model_executor.model_loader`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import SHARDED

raise absent("vllm.model_executor.model_loader", SHARDED)
