"""vLLM's `distributed.parallel_state`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import PARALLEL

raise absent("vllm.distributed.parallel_state", PARALLEL)
