"""A KV connector that says in its statistics how many blocks it was given, and keeps none."""

from __future__ import annotations

from quire.kv_transfer import KVConnector


class AcmeBlocks(KVConnector):
    """Counts the blocks of requests that ended."""

    quire_contract = 1
    extra_config_keys = ("colour",)

    def __init__(self, config, role, layout):
        super().__init__(config, role, layout)
        self.num_blocks = 0

    def request_finished(self, request, block_ids):
        self.num_blocks += len(block_ids)
        return False, None

    def get_kv_connector_stats(self):
        num_blocks, self.num_blocks = self.num_blocks, 0
        return {"acme_blocks": num_blocks}
