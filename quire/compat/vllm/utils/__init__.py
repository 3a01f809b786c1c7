"""vLLM's `utils`."""

from __future__ import annotations

from quire.compat.vllm.utils.argparse_utils import FlexibleArgumentParser
from quire.compat.vllm.utils.network_utils import get_ip, get_open_port
from quire.compat.vllm.utils.random_id import random_uuid

__all__ = ["FlexibleArgumentParser", "get_ip", "get_open_port", "random_uuid"]
