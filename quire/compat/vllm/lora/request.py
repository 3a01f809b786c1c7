"""vLLM's `lora.request`: a class that says what is missing when one is made."""

from __future__ import annotations

from quire.compat.absent import absent_class
from quire.compat.vllm.features import LORA

__all__ = ["LoRARequest"]

LoRARequest = absent_class("LoRARequest", LORA)
