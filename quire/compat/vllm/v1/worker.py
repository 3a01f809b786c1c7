"""vLLM's `v1.worker`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import WORKERS

raise absent("vllm.v1.worker", WORKERS)
