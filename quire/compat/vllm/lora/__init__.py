"""vLLM's `lora`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import LORA

raise absent("vllm.lora", LORA)
