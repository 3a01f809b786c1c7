"""vLLM's `model_executor.models`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import PLUGIN_MODELS

raise absent("vllm.model_executor.models", PLUGIN_MODELS)
