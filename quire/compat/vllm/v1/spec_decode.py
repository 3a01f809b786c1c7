"""vLLM's `v1.spec_decode`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import SPECULATION

raise absent("vllm.v1.spec_decode", SPECULATION)
