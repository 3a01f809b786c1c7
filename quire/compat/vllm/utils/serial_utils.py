"""vLLM's `utils.serial_utils`: importing it names the feature that Quire lacks."""

from __future__ import annotations

from quire.compat.absent import absent
from quire.compat.vllm.features import TENSORS

raise absent("vllm.utils.serial_utils", TENSORS)
