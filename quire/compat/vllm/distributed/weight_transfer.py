"""vLLM's `distributed.weight_transfer`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import WEIGHT_TRANSFER

raise absent("vllm.distributed.weight_transfer", WEIGHT_TRANSFER)
