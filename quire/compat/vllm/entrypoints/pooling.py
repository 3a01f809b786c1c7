"""vLLM's `entrypoints.pooling`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import POOLING

raise absent("vllm.entrypoints.pooling", POOLING)
