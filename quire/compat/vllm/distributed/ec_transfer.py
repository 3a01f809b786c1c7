"""vLLM's `distributed.ec_transfer`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import EC_TRANSFER

raise absent("vllm.distributed.ec_transfer", EC_TRANSFER)
