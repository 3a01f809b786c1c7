"""vLLM's `v1.core.sched`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import INTERNALS

raise absent("vllm.v1.core.sched", INTERNALS)
