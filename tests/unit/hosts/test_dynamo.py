"""A worker of Dynamo: requests and chunks, over an engine, with a stand-in for the contract of the `dynamo` package."""

from __future__ import annotations

import asyncio
import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli import main as cli
from quire.config import QuireConfig
from quire.config.build import build_config
from quire.config.dynamo import DynamoConfig
from quire.core.outputs import CompletionOutput, Logprob, RequestOutput
from quire.core.sampling_params import RequestOutputKind
from quire.core.stats import RequestStateStats
from quire.engine.generation_defaults import GenerationDefaults
from quire.errors import EngineDeadError, EngineGenerateError, UnsupportedError, ValidationError
from quire.hosts.dynamo.chunks import ChunkMaker
from quire.hosts.dynamo.requests import prefill_params, read_request, request_options, sampling_params

REQUEST: dict[str, Any] = {
    "model": "leaf", "token_ids": [5, 6, 7],
    "stop_conditions": {"max_tokens": 9, "stop": ["x"], "stop_token_ids": [8], "stop_token_ids_hidden": [0, 2],
                        "min_tokens": 2, "ignore_eos": None, "max_thinking_tokens": None},
    "sampling_options": {"n": 1, "best_of": None, "temperature": 0.7, "top_p": None, "top_k": 5, "seed": 3,
                         "use_beam_search": None, "length_penalty": None, "guided_decoding": None},
    "output_options": {"logprobs": 2, "prompt_logprobs": None, "skip_special_tokens": True},
    "eos_token_ids": [2], "annotations": [], "routing": {"dp_rank": None, "priority": 4},
    "extra_args": {"nvext": {"cache_salt": "salt"}},
}  # fmt: skip


def params_of(**changes: Any) -> Any:
    return sampling_params(read_request({**REQUEST, **changes}), {"top_p": 0.8})


def test_a_request_is_mapped_in_full_and_null_means_the_model_s_own_default():
    params = params_of()
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k, params.seed) == (9, 2, 0.7, 5, 3)
    assert params.top_p == 0.8 and params.logprobs == 2 and params.prompt_logprobs is None
    assert params.stop_token_ids == [8, 0, 2] and not params.stop and not params.detokenize
    assert params.output_kind is RequestOutputKind.DELTA
    assert params_of(stop_conditions={"ignore_eos": True, "stop_token_ids_hidden": [2]}).stop_token_ids is None
    assert params_of(stop_conditions=None).max_tokens is None
    guided = {"json": {"type": "object"}, "regex": None, "backend": "xgrammar"}
    assert params_of(sampling_options={"guided_decoding": guided}).structured_outputs.json == {"type": "object"}
    options = request_options(read_request(REQUEST), has_priorities=True)
    assert (options.priority, options.cache_salt) == (-4, "salt")
    assert request_options(read_request(REQUEST), has_priorities=False).priority == 0


def test_a_decode_request_carries_what_the_prefill_worker_s_connector_said():
    said = {"do_remote_prefill": True, "remote_engine_id": "a"}
    result = {"disaggregated_params": {"kv_transfer_params": said}}
    assert params_of(prefill_result=result).extra_args == {"kv_transfer_params": said}
    assert prefill_params().extra_args["kv_transfer_params"]["do_remote_decode"] is True
    assert prefill_params().max_tokens == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling_options": {"n": 2}}, "n"),
        ({"sampling_options": {"best_of": 2}}, "best_of"),
        ({"sampling_options": {"sharpness": 2}}, "sharpness"),
        ({"sampling_options": {"beam_search": {"num_beams": 2}}}, "beam_search"),
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"temperature": "hot"}}, "temperature"),
        ({"sampling_options": {"guided_decoding": {"regex": 5}}}, "guided_decoding"),
        ({"token_ids": "text"}, "request"),
        ({"stop_conditions": {"max_tokens": "many"}}, "request"),
        ({"multi_modal_data": {"image": [1]}}, "multi_modal_data"),
        ({"extra_args": {"kv_transfer_params": 5}}, "kv_transfer_params"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes, field):
    with pytest.raises((ValidationError, UnsupportedError)) as caught:
        params_of(**changes)
    assert caught.value.field == field


def output(
    token_ids: list[int], reason: str | None = None, logprobs: Any = None, transfer: dict[str, Any] | None = None
) -> RequestOutput:
    one = CompletionOutput(0, "", token_ids, logprobs=logprobs, finish_reason=reason)
    return RequestOutput(
        "a", None, [5, 6, 7], [one], reason is not None, num_cached_tokens=2, kv_transfer_params=transfer,
        metrics=RequestStateStats(num_generation_tokens=2),
    )  # fmt: skip


def test_chunks_have_tokens_log_probabilities_and_at_the_end_usage():
    maker = ChunkMaker()
    lines = [{9: Logprob(-0.5, 1, "a"), 4: Logprob(-1.5, 2, "b")}]
    (chunk,) = maker.chunks(output([9], logprobs=lines))
    assert chunk["token_ids"] == [9] and chunk["log_probs"] == [-0.5] and "finish_reason" not in chunk
    assert [one["token_id"] for one in chunk["top_logprobs"][0]] == [9, 4]
    assert chunk["top_logprobs"][0][0] == {"rank": 1, "token_id": 9, "token": "a", "logprob": -0.5, "bytes": [97]}
    (last,) = maker.chunks(output([8], "abort"))
    assert last["finish_reason"] == "cancelled"
    assert last["completion_usage"] == {
        "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    (prefilled,) = ChunkMaker(is_prefill=True).chunks(output([8], "stop", transfer={"remote_engine_id": "a"}))
    assert prefilled["finish_reason"] == "length"
    assert prefilled["disaggregated_params"] == {"kv_transfer_params": {"remote_engine_id": "a"}}
    assert maker.chunks(output([])) == []


class Mode(Enum):
    AGGREGATED, PREFILL, DECODE = "agg", "prefill", "decode"


@dataclass
class Record:
    """Stands for the records of the contract, which are filled by name."""

    fields: dict[str, Any] = field(default_factory=dict)

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class InvalidArgument(Exception):
    pass


class EngineShutdown(Exception):
    pass


class Unknown(Exception):
    pass


class Context:
    def id(self) -> str:
        return "request"


class Stream:
    """Hands out one result after another."""

    def __init__(self, results: list[Any], engine: Engine) -> None:
        self._results = results
        self._engine = engine

    async def get(self) -> Any:
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        self._engine.is_closed = True


class Engine:
    """As much of `AsyncLLM` as a worker uses: hands out what it is given."""

    def __init__(self, results: list[Any]) -> None:
        self.config = QuireConfig()
        self.defaults = GenerationDefaults()
        self.results = results
        self.asked: list[Any] = []
        self.aborted: list[str] = []
        self.is_closed = self.is_stopped = False

    async def open_stream(self, prompt: Any, params: Any, request_id: str, options: Any) -> Stream:
        self.asked.append((prompt, params, request_id, options))
        if isinstance(self.results[0], ValidationError):
            raise self.results[0]
        return Stream(self.results, self)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's module, over a stand-in for `dynamo`."""
    contents: dict[str, dict[str, Any]] = {
        "dynamo": {}, "dynamo.common": {}, "dynamo.llm": {},
        "dynamo.common.backend": {"run": SimpleNamespace(run=lambda *given: None)},
        "dynamo.common.backend.engine": {"EngineConfig": Record, "LLMEngine": object, "LlmRegistration": Record},
        "dynamo.common.backend.health_check": {
            "build_health_check_payload": lambda bos_token_id: {"token_ids": [bos_token_id]},
            "is_probe": lambda request: bool(request.get("probe")),
        },
        "dynamo.common.backend.metrics": {"register_engine_registry": lambda metrics, registry: None},
        "dynamo.common.backend.publisher": {"ComponentSnapshot": Record, "ZmqSource": Record},
        "dynamo.common.backend.worker": {"WorkerConfig": Record},
        "dynamo.common.constants": {"DisaggregationMode": Mode},
        "dynamo.llm.exceptions": {
            "EngineShutdown": EngineShutdown, "InvalidArgument": InvalidArgument, "Unknown": Unknown,
        },
    }  # fmt: skip
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "quire.hosts.dynamo.backend", raising=False)
    yield importlib.import_module("quire.hosts.dynamo.backend")
    sys.modules.pop("quire.hosts.dynamo.backend", None)


def chunks_of(worker: Any, request: dict[str, Any]) -> list[Any]:
    async def collect() -> list[Any]:
        return [chunk async for chunk in worker.generate(request, Context())]

    return asyncio.run(collect())


def make_worker(backend: Any, results: list[Any], mode: str = "agg") -> tuple[Any, Engine]:
    worker = backend.QuireWorker(build_config(model="leaf"), DynamoConfig(disaggregation_mode=mode), "/models/leaf")
    worker._engine = engine = Engine(results)
    return worker, engine


def test_a_worker_streams_chunks_and_its_engine_s_request_ends_with_the_stream(backend):
    worker, engine = make_worker(backend, [output([9]), output([8], "length")])
    assert [chunk["token_ids"] for chunk in chunks_of(worker, REQUEST)] == [[9], [8]]
    prompt, params, request_id, options = engine.asked[0]
    assert prompt == {"prompt_token_ids": [5, 6, 7]} and request_id == "request" and options.cache_salt == "salt"
    assert params.seed == 3 and engine.is_closed
    asyncio.run(worker.abort(Context()))
    assert engine.aborted == ["request"]
    for _ in range(2):
        asyncio.run(worker.cleanup())
    assert engine.is_stopped
    with pytest.raises(EngineShutdown):
        chunks_of(worker, REQUEST)


def test_the_parts_of_a_disaggregated_request_keep_to_their_contract(backend):
    prefill, engine = make_worker(backend, [output([9], "length", transfer={"a": 1})], "prefill")
    (chunk,) = chunks_of(prefill, REQUEST)
    assert chunk["disaggregated_params"] == {"kv_transfer_params": {"a": 1}} and engine.asked[0][1].max_tokens == 1
    decode, engine = make_worker(backend, [output([9], "stop")], "decode")
    with pytest.raises(InvalidArgument, match="prefill_result"):
        chunks_of(decode, REQUEST)
    chunks_of(decode, {**REQUEST, "prefill_result": {"disaggregated_params": {"kv_transfer_params": {"a": 1}}}})
    assert engine.asked[0][1].extra_args == {"kv_transfer_params": {"a": 1}}
    probed, _ = make_worker(backend, [output([9], "stop")], "decode")
    assert chunks_of(probed, {**REQUEST, "probe": True})


def test_errors_are_those_that_dynamo_understands(backend, monkeypatch):
    signals: list[int] = []
    monkeypatch.setattr(backend.os, "kill", lambda pid, number: signals.append(number))
    for error, kind in (
        (ValidationError("wrong"), InvalidArgument), (EngineGenerateError("failed"), Unknown),
        (EngineDeadError("gone"), EngineShutdown),
    ):  # fmt: skip
        worker, _ = make_worker(backend, [error])
        with pytest.raises(kind, match=error.message):
            chunks_of(worker, REQUEST)
    assert signals == [backend.signal.SIGTERM]  # of an engine that has stopped for good
    with pytest.raises(InvalidArgument, match="sharpness"):
        chunks_of(worker, {**REQUEST, "sampling_options": {"sharpness": 1}})


def test_a_worker_is_registered_by_its_mode_and_by_the_environment(backend, monkeypatch):
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "file")
    config = build_config(model="leaf", served_model_name="name", kv_events_config={"enable_kv_cache_events": True})
    made = backend.worker_config(config, DynamoConfig(disaggregation_mode="prefill"), "/models/leaf").fields
    assert made["component"] == "prefill" and made["discovery_backend"] == "file" and made["namespace"] == "dynamo"
    assert made["model_name"] == "/models/leaf" and made["served_model_name"] == "name"
    worker = backend.QuireWorker(config, DynamoConfig(), "/models/leaf")
    (source,) = asyncio.run(worker.kv_event_sources())
    assert source.fields["endpoint"] == "tcp://127.0.0.1:5557" and worker.component_metrics_dp_ranks() == [0]
    assert backend.QuireWorker(config, DynamoConfig(enable_kv_routing=False), "a").component_metrics_dp_ranks() == []


def test_the_command_says_what_is_missing_and_loads_dynamo_only_when_it_runs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "dynamo", None)
    assert cli.main(["dynamo", "leaf"]) == 2
    assert "Dynamo cannot be imported" in capsys.readouterr().err
    for value, words in (("both", "disaggregation_mode"), ("decode", "needs a KV connector")):
        assert cli.main(["dynamo", "leaf", "--disaggregation-mode", value]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["dynamo", "leaf", "--component", "mine", "--print-config"]) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown and "enable_kv_cache_events" in shown
