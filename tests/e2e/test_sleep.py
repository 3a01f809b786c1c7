"""Sleep mode with the embedded model: memory goes and comes back, and answers have the bytes that they had."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.errors import EngineSleepingError, UnsupportedError, ValidationError
from tests.robustness.server_process import ServerProcess, children_of

GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=1)


def answers(llm: LLM) -> list:
    return [
        (one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(["Once upon", "One day"], GREEDY)
    ]


def test_an_llm_sleeps_and_wakes_up_with_the_same_bytes():
    with LLM("leaf", enable_sleep_mode=True, max_model_len=256, num_blocks=64) as llm:
        first = answers(llm)
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(EngineSleepingError, match="asleep"):
                llm.generate("Once", GREEDY)
            assert llm.llm_engine.is_asleep and llm.wake_up(["weights"])
            assert answers(llm) == first
        with pytest.raises(ValidationError, match="level=3 is unknown"):
            llm.sleep(3)
    with (
        LLM("leaf", max_model_len=256, num_blocks=64) as llm,
        pytest.raises(UnsupportedError, match="sleep mode is off"),
    ):
        llm.sleep()


def resident_bytes(pid: int) -> int:
    """Of a process and its children."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(child) for child in children_of(pid))


def test_a_server_that_sleeps_has_no_core_and_answers_with_the_same_bytes_when_it_is_awake():
    ask = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "logprobs": 1}
    with ServerProcess("--enable-sleep-mode", "--max-model-len", "256", "--sleeping-requests", "wake") as server:
        url = f"http://127.0.0.1:{server.port}"

        def answer() -> object:
            return httpx.post(f"{url}/v1/completions", json=ask, timeout=120).json()["choices"]

        first, awake = answer(), resident_bytes(server.pid)
        assert httpx.post(f"{url}/sleep?level=2", timeout=60).json() == {"status": "sleeping", "level": 2}
        assert httpx.get(f"{url}/is_sleeping").json() == {"is_sleeping": True}
        asleep = resident_bytes(server.pid)
        assert not children_of(server.pid) and asleep < 0.6 * awake
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.post(f"{url}/sleep?level=9").status_code == 400
        slip = httpx.post(f"{url}/sleep?modes=keep")
        assert slip.status_code == 400 and slip.json()["error"]["param"] == "modes"
        assert httpx.post(f"{url}/resume?now=1").json()["error"]["param"] == "now"
        assert answer() == first, "the request has woken it up"
        assert httpx.get(f"{url}/is_sleeping").json() == {"is_sleeping": False}
        assert httpx.post(f"{url}/wake_up?tags=weights").json() == {"status": "awake"}
        assert "Traceback" not in server.log
        print(f"awake {awake / 1e6:.0f} MB, asleep {asleep / 1e6:.0f} MB")
