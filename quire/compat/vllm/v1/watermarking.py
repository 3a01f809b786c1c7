"""vLLM's `v1.watermarking`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import WATERMARK

raise absent("vllm.v1.watermarking", WATERMARK)
