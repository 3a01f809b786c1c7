"""Profiles of steps: kernels with their times, the same tokens, nothing left behind; the table, the routes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire import LLM, SamplingParams
from quire.cli import main as cli
from quire.config.build import build_config
from quire.config.profiler import parse_profiler_config
from quire.errors import ConfigError, QuireError, ValidationError
from tests.server.engines import ScriptedEngine, scripted_config
from tests.server.servers import RunningServer
from tests.server.test_safety import bearer

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["Once upon a time", "The dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(folder)})
    llm = LLM("leaf", max_model_len=256, max_num_seqs=2, profiler_config=config, enable_prefix_caching=False)
    yield llm
    llm.shutdown()


def token_ids(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_a_profile_has_steps_and_kernels_and_changes_no_token(llm: LLM, folder: Path, capsys):
    expected = token_ids(llm)
    runtime = llm.collective_rpc(lambda worker: worker._ops.runtime)[0]
    llm.start_profile()
    with pytest.raises(ValidationError, match="being taken"):
        llm.start_profile()
    assert token_ids(llm) == expected and runtime.is_profiled
    llm.stop_profile()
    llm.stop_profile()
    assert not runtime.is_profiled and token_ids(llm) == expected
    of_torch, path = sorted(folder.iterdir(), key=lambda one: "torch" not in one.name)
    spans = [one for one in json.loads(path.read_text())["traceEvents"] if one["ph"] == "X"]
    steps = [one for one in spans if one["name"] == "step: forward"]
    kernels = [one for one in spans if one["tid"] == 2]
    assert len(steps) == 12 and sum(one["args"]["tokens"] for one in steps[1:]) == 2 * 11
    assert {"linear", "paged_attention", "rms_norm"} <= {one["name"] for one in kernels}
    begin, end = steps[0]["ts"], spans[len(steps) * 2 - 1]["ts"] + spans[len(steps) * 2 - 1]["dur"]
    assert all(begin <= one["ts"] and one["ts"] + one["dur"] <= end for one in kernels)
    products = [one["args"] for one in kernels if one["name"] == "linear"]
    assert all(one["flops"] == 2 * one["rows"] * one["inputs"] * one["outputs"] for one in products)
    assert json.loads(of_torch.read_text())["traceEvents"]

    assert cli.main(["profile", "summary", str(path)]) == 0
    table = capsys.readouterr().out
    assert "step: forward" in table and "linear" in table and "GFLOP/s" in table
    assert cli.main(["profile", "summary", str(path), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["step: forward"]["calls"] == 12 and rows["linear"]["calls"] == len(products)
    assert rows["linear"]["flops"] == sum(one["flops"] for one in products)
    assert abs(rows["step: forward"]["share"] + rows["step: sample"]["share"] - 1) < 1e-9
    assert cli.main(["profile", "summary", str(of_torch)]) == 0 and "aten::" in capsys.readouterr().out


def test_a_profile_of_so_many_steps_ends_by_itself(tmp_path: Path):
    config = {"profiler": "kernels", "torch_profiler_dir": str(tmp_path), "delay_iterations": 2, "max_iterations": 3}
    llm = LLM("leaf", max_model_len=256, max_num_seqs=2, profiler_config=json.dumps(config))
    llm.start_profile()
    token_ids(llm)
    (path,) = tmp_path.iterdir()
    assert path.name.endswith("-3-steps.json")
    assert sum(one["name"] == "step: forward" for one in json.loads(path.read_text())["traceEvents"]) == 3
    llm.shutdown()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"profiler_config": "[]"}, "not a JSON object"),
        ({"profiler_config": '{"profiler": "cuda"}'}, "not supported"),
        ({"profiler_config": '{"torch_dir": "x"}'}, "unknown key"),
        ({"profiler_config": '{"profiler": "torch"}'}, "missing"),
        ({"profile": "x", "profiler_config": '{"torch_profiler_dir": "y"}'}, "two ways"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], words: str):
    with pytest.raises(QuireError, match=words) as error:
        build_config(model="leaf", **settings)
    assert error.value.field in settings
    assert parse_profiler_config(None, "{}") is None and parse_profiler_config(None, None) is None


def test_a_directory_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path):
    (tmp_path / "file").touch()
    for path, why in (("file", "it is not a directory"), ("file/below", "Not a directory")):
        with pytest.raises(ConfigError, match=f"for profiles .* cannot be used: {why}") as error:
            LLM("leaf", profile=str(tmp_path / path))
        assert error.value.field == "profile"


@pytest.mark.parametrize("content", ["no JSON", "[]", '{"traceEvents": 5}', '{"traceEvents": [{"ph": "X", "dur": 1}]}'])
def test_a_file_that_is_not_a_profile_is_refused(tmp_path: Path, content: str, capsys):
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert cli.main(["profile", "summary", str(path)]) == 2 and "is not a profile" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="missing"):
        parse_profiler_config(None, '{"profiler": "kernels"}')


def test_the_routes_are_for_operators_of_servers_that_have_a_directory(tmp_path: Path):
    (tmp_path / "keys.yaml").write_text(
        "tenants:\n  ops: {keys: [operator-key-1], operator: true}\n  red: {keys: [red-key-1234]}\n"
    )
    engine = ScriptedEngine(config=scripted_config(profile=str(tmp_path / "profiles")))
    with RunningServer(engine, api_key_file=str(tmp_path / "keys.yaml")) as server:

        def ask(what: str, key: str = "operator-key-1") -> tuple[int, Any]:
            answer = httpx.post(f"{server.url}/{what}_profile", headers=bearer(key))
            return answer.status_code, answer.json()

        assert ask("start", "red-key-1234")[0] == 403
        assert ask("stop")[0] == 409
        assert ask("start") == (200, {"is_profiling": True, "directory": str(tmp_path / "profiles")})
        status, refusal = ask("start")
        assert status == 409 and refusal["error"]["type"] == "Conflict"
        assert ask("stop")[0] == 200 and engine.is_profiled is False
    with RunningServer(ScriptedEngine(), api_key_file=str(tmp_path / "keys.yaml")) as server:
        off = httpx.post(f"{server.url}/start_profile", headers=bearer("operator-key-1"))
        assert off.status_code == 404 and "--profile" in off.json()["error"]["message"]
