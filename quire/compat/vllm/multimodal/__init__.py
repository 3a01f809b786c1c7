"""vLLM's `multimodal`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import MULTIMODAL

raise absent("vllm.multimodal", MULTIMODAL)
