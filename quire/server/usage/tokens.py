"""TokenAccounts: what tenants use, counted once for each request, when it ends.

Asked by `chat.running`. Owns the ledger, if there is one; the counters are of the server's metrics.
"""

from __future__ import annotations

from quire.config.server import UsageConfig
from quire.metrics.server_metrics import ServerMetrics
from quire.server.usage.ledger import TokenUse, UsageLedger


class TokenAccounts:
    """Counters, and the ledger.

    Args:
        ledger: None = nothing is kept beyond the process.
    """

    def __init__(self, metrics: ServerMetrics, ledger: UsageLedger | None = None) -> None:
        self._metrics = metrics
        self.ledger = ledger

    def add(self, tenant: str, key: str, model: str, use: TokenUse) -> None:
        """A request has ended; `key` is the fingerprint of its API key."""
        self._metrics.record_tenant(tenant, *use)
        if self.ledger is not None:
            self.ledger.add(tenant, key, model, use)

    def close(self) -> None:
        """Write what is left."""
        if self.ledger is not None:
            self.ledger.close()


def make_accounts(config: UsageConfig, metrics: ServerMetrics) -> TokenAccounts:
    """As the settings say.

    Raises:
        ConfigError: the file of the ledger cannot be used.
    """
    path = config.usage_ledger
    return TokenAccounts(metrics, None if path is None else UsageLedger(path, config.usage_ledger_max_days))
