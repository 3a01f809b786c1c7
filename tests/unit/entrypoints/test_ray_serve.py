"""The application of Ray Serve, over a fake of what it asks Serve for. `make test-ray-serve` has the real one."""

from __future__ import annotations

import asyncio
import sys
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from quire.entrypoints import ray_serve
from quire.errors import ConfigError

ROOT = Path(__file__).parents[3]
SETTINGS = {"model": "leaf", "num-threads": "1", "max_num_seqs": "4", "max_model_len": 256}


def fake_serve(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the application asked for."""
    asked: dict[str, Any] = {}

    def ingress(make: Any) -> Any:
        asked["app"] = make()
        return lambda kind: kind

    def deployment(kind: type, **options: Any) -> Any:
        asked.update(options, kind=kind)
        return types.SimpleNamespace(bind=lambda: kind)

    module = types.ModuleType("ray.serve")
    module.ingress, module.deployment = ingress, deployment  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.serve", module)
    return asked


def test_a_replica_has_the_api_of_quire_serve_and_is_well_while_its_engine_is(monkeypatch: pytest.MonkeyPatch):
    asked = fake_serve(monkeypatch)
    replica = ray_serve.build({**SETTINGS, "num_replicas": "2"})()
    assert (asked["num_replicas"], asked["ray_actor_options"]) == (2, {"num_cpus": 1.0})
    app = asked["app"]
    asyncio.run(replica.check_health())

    async def talk() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            models = (await client.get("/v1/models")).json()
            body = {"model": "leaf", "prompt": "Once", "max_tokens": 3, "temperature": 0, "stream": True}
            answer = (await client.post("/v1/completions", json=body)).text
            await replica.check_health()
            return [models["data"][0]["id"], answer.count("data: "), answer.endswith("data: [DONE]\n\n")]

    name, num_events, is_whole = asyncio.run(talk())
    assert name == "leaf" and num_events >= 2 and is_whole
    app.close()
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        asyncio.run(replica.check_health())


def test_the_file_that_is_shipped_names_the_application_and_valid_arguments():
    (application,) = yaml.safe_load((ROOT / "deploy/ray/quire.yaml").read_text())["applications"]
    assert application["import_path"] == "quire.entrypoints.ray_serve:build"
    assert ray_serve.read_deployment(application["args"]).values["model"] == "leaf"


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"num_replicas": "0"}, "num_replicas"), ({"num_cpus": "many"}, "num_cpus"),
        ({"max_num_seqs": "x"}, "max_num_seqs"), ({"no_such_setting": 1}, "no_such_setting"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_named_before_anything_is_deployed(args: dict[str, Any], field: str):
    with pytest.raises(ConfigError) as caught:
        ray_serve.build({"model": "leaf", **args})
    assert caught.value.field == field


def test_without_ray_serve_the_error_has_the_fix(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray.serve", None)
    with pytest.raises(ConfigError, match="Ray Serve cannot be imported") as caught:
        ray_serve.build({"model": "leaf"})
    assert "quire[ray-serve]" in str(caught.value)
