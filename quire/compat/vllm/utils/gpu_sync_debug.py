"""vLLM's `utils.gpu_sync_debug`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import RUNNER_V2

raise absent("vllm.utils.gpu_sync_debug", RUNNER_V2)
