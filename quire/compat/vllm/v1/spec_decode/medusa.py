"""vLLM's `v1.spec_decode.medusa`: importing it names what is missing; the method is a setting."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import INTERNALS

raise absent("vllm.v1.spec_decode.medusa", INTERNALS)
