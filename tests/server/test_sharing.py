"""What the HTTP layer tells the scheduler of tenants and deadlines, and clients of waits that were too long."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.core.tenancy import NO_TENANT, TenantShare
from quire.errors import ConfigError, QueueTimeoutError
from tests.server.engines import ScriptedEngine, scripted_config
from tests.server.servers import RunningServer
from tests.server.test_protocol import post
from tests.server.test_safety import bearer

COMPLETE = "/v1/completions"
PROMPT: dict[str, Any] = {"prompt": [7] * 10, "max_tokens": 3}
FILE = """\
tenants:
  default: {keys: [operator-key-1]}
  red: {keys: [red-key-1234], weight: 2.5, policy: priority, priority: 3}
"""


class WaitsInVain(ScriptedEngine):
    """No request gets its turn."""

    def _fail(self, position: int) -> None:
        raise QueueTimeoutError("not admitted within queue_timeout=2 s", hint="try again later")


@pytest.fixture(scope="module")
def vain():
    with RunningServer(WaitsInVain()) as running:
        yield running


def test_a_tenants_weight_and_policy_reach_the_engine(tmp_path, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    file = tmp_path / "keys.yaml"
    file.write_text(FILE)
    engine = ScriptedEngine(config=scripted_config(scheduling_policy="fair"))
    with RunningServer(engine, api_key_file=str(file)) as server:
        for key in ("red-key-1234", "operator-key-1"):
            assert post(server, COMPLETE, PROMPT, headers=bearer(key)).status_code == 200
    assert engine.tenants == [
        TenantShare(name="red", weight=2.5, policy="priority"),
        TenantShare(name="default", weight=1.0, policy="fcfs"),
    ]
    assert engine.priorities == [3, 0]


def test_a_weight_that_is_shared_by_nobody_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    file = tmp_path / "keys.yaml"
    file.write_text("tenants:\n  red: {keys: [red-key-1234], weight: 2}\n")
    with (
        pytest.raises(ConfigError, match=r"tenant red: weight=2.* has no effect under scheduling_policy='fcfs'"),
        RunningServer(ScriptedEngine(), api_key_file=str(file)),
    ):
        pass


def test_a_queue_timeout_reaches_the_engine_and_none_leaves_it_to_the_settings():
    engine = ScriptedEngine()
    with RunningServer(engine) as server:
        for timeout in (1.5, 0, None):
            assert post(server, COMPLETE, {**PROMPT, "queue_timeout": timeout}).status_code == 200
        for bad in (-1, 1e10, "soon"):
            answer = post(server, COMPLETE, {**PROMPT, "queue_timeout": bad})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "queue_timeout"
    assert engine.queue_timeouts == [1.5, 0, None] and engine.tenants[0].name in (NO_TENANT.name, "default")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_wait_that_was_too_long_is_503_with_a_time_to_come_back(vain, stream):
    answer = post(vain, COMPLETE, {**PROMPT, "stream": stream})
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "ServiceUnavailableError", "queue_timeout", "queue_timeout",
    )  # fmt: skip
    page = httpx.get(vain.url + "/metrics").text
    assert 'finished_reason="queue_timeout"' in page
    assert 'quire:requests_refused_total{reason="queue_timeout",tenant=""}' in page
