"""Tokens per block that each attention backend works best with. A table of its own, so that it loads without torch."""

from __future__ import annotations

PREFERRED_BLOCK_SIZES = {"native_cpu": 32, "torch_reference": 16}
