"""Several connectors as one: saved to all, loaded from the first that has it, freed when the last has sent."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.kv_transfer import KVTransferConfig
from quire.errors import ConfigError
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.multi import MultiConnector
from tests.unit.kv_transfer import scripted_connector
from tests.unit.kv_transfer.scripted_connector import layout_of, make_engine
from tests.unit.kv_transfer.test_connector_in_scheduler import answer_to, run, settle
from tests.unit.scheduler.harness import Engine, make_request

PART = {"kv_connector": "ScriptedConnector", "kv_connector_module_path": scripted_connector.__name__}


def make(**more: Any) -> tuple[Engine, MultiConnector, MultiConnector]:
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [PART, PART]}, **more}
    engine, front, back = make_engine(transfer=transfer, kind=MultiConnector)
    return engine, front, back


def filled() -> tuple[Engine, MultiConnector, MultiConnector]:
    engine, front, back = make()
    run(engine, 0)
    assert all(len(one.known) == 7 for one in front.connectors) and engine.scheduler.reset_prefix_cache()
    return engine, front, back


def test_blocks_are_saved_to_all_and_loaded_from_the_first_that_has_them():
    engine, front, back = filled()
    run(engine, 1)
    first, second = (one.num_begun for one in back.connectors)
    assert engine.tokens[1] == answer_to(1) and (first, second) == (3, 2), "two saves each, and one load"
    front.connectors[0].known.clear()
    assert engine.scheduler.reset_prefix_cache()
    run(engine, 2)
    assert engine.tokens[2] == answer_to(2) and back.connectors[1].num_begun == second + 2


def test_blocks_stay_until_the_slowest_has_sent_them():
    engine, _, back = make()
    back.connectors[1].delay = lambda number: 6
    engine.add(*[make_request(0, [5, 6, 7, 8] * 4, max_tokens=2)])
    while 0 not in engine.finished:
        engine.step()
    for _ in range(5):
        assert engine.scheduler._kv.usage > 0
        engine.step()
    settle(engine)
    assert engine.scheduler._kv.usage == 0.0


@pytest.mark.parametrize(
    "extra", [{}, {"connectors": []}, {"connectors": "ExampleConnector"}, {"connectors": [{"kv_connector": "Multi"}]}]
)
def test_what_is_not_a_list_of_connectors_is_refused(extra):
    config = KVTransferConfig(kv_connector="Multi", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match="Multi needs connectors, a list of objects"):
        MultiConnector(config, KVConnectorRole.SCHEDULER, layout_of(4))
