"""Three models in engine cores of their own, with room for two: the small version of `make switching`."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import httpx

from quire.cli.serve_models import make_models_server
from quire.config.server import ServerConfig
from quire.config.switching import read_models_file
from quire.engine.async_llm import AsyncLLM
from tests.robustness.switching import BROKEN, FAMILIES, SETTINGS, answers_alone, ask_all, make_asked, write_models
from tests.server.servers import RunningServer, server_config


def test_requests_to_three_models_in_two_places_are_answered_as_by_each_alone_and_survive_a_killed_core(tmp_path: Path):
    path = write_models(tmp_path)
    asked = make_asked(24, random.Random(3))
    assert {one.model for one in asked} == {*FAMILIES, BROKEN}
    expected = answers_alone(tmp_path, asked, 8)
    config: ServerConfig = server_config(port=0)
    pool, server = make_models_server(read_models_file(path, SETTINGS), config, "fcfs")
    try:
        with RunningServer(None, server=server) as running:
            outcome = ask_all(running.url, asked, expected, 8, num_clients=len(asked))
            assert (outcome.lost, outcome.wrong) == ([], [])
            assert outcome.num_right + outcome.num_refused == len(asked) and outcome.num_refused
            assert pool.schedule.used_bytes <= pool.schedule.budget_bytes
            loaded = next(model for model in pool.models.values() if model.state is not None)
            assert loaded.state is not None and isinstance(loaded.state.engine, AsyncLLM)
            os.kill(loaded.state.engine.core_pid or 0, signal.SIGKILL)
            again = [one for one in asked if one.model == loaded.name]
            assert ask_all(running.url, again, expected, 8).num_right == len(again)
            assert httpx.get(f"{running.url}/health").status_code == 200
    finally:
        pool.shutdown()
