"""The worker's half of a connector: what a step that failed leaves behind is not carried into the next one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.config.kv_transfer import KVTransferConfig
from quire.core.kv_transfer import BlockTransfer, ConnectorMessage, KVTransferMeta
from quire.kv_transfer.connector import KVConnectorRole
from quire.worker.connector_worker import ConnectorWorker
from tests.unit.kv_transfer.scripted_connector import ScriptedConnector, Slots, layout_of


class Layerwise(ScriptedConnector):
    has_layer_hooks = True


@pytest.fixture
def worker() -> ConnectorWorker:
    half = Layerwise(KVTransferConfig(kv_connector="Layerwise"), KVConnectorRole.WORKER, layout_of(4))
    worker = ConnectorWorker(half, {})
    worker.register_kv_caches(Slots(np.zeros((8, 4))))  # type: ignore[arg-type]
    return worker


def transfer(number: int, **more: Any) -> BlockTransfer:
    return BlockTransfer(number, (b"name",), np.array([number], dtype=np.int32), request_id=f"r{number}", **more)


def test_calls_around_layers_are_made_in_steps_with_metadata_alone(worker):
    worker.begin_step()
    worker.start_transfers(KVTransferMeta(connector=ConnectorMessage(([], []))))
    assert worker.layer_hooks() is not None
    worker.begin_step()  # the step failed before it was sampled, and this one has no transfers
    assert worker.layer_hooks() is None
    assert worker.get_finished().failed == ()


def test_transfers_that_are_sent_again_fail_unless_the_connector_was_given_them(worker):
    known = transfer(1)
    worker.start_transfers(KVTransferMeta(saves=(known,), connector=ConnectorMessage(([], [("r1", [(b"n", 1)])]))))
    again = (transfer(1, is_repeated=True), transfer(2, is_repeated=True))
    worker.begin_step()
    worker.start_transfers(KVTransferMeta(saves=again, connector=ConnectorMessage()))
    results = worker.get_finished()
    assert (results.done, results.failed) == ((1,), (2,))


def test_loads_of_which_the_connector_says_nothing_fail(worker):
    worker.start_transfers(KVTransferMeta(loads=(transfer(1),), connector=ConnectorMessage()))
    assert worker.get_finished().failed == (1,)
