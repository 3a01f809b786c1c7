"""vLLM's `usage.usage_lib`; nothing is reported to anybody."""

from __future__ import annotations

from quire.config.resolve import UsageContext

__all__ = ["UsageContext"]
