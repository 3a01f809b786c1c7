"""A package adds each kind of plugin, and no file of Quire changes: `tests/plugins/acme` in engines and servers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli import run_batch, serve
from quire.cli.main import main
from quire.config.build import build_config
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.args import QuireParser
from quire.errors import ConfigError, ModelError, QuireError, ValidationError
from quire.flight_recorder.reader import read_recording
from quire.flight_recorder.records import MAGIC, VERSION, Head, frame
from quire.parsers.registry import reasoning_parser, tool_call_parser
from quire.plugins import KINDS, installed
from tests.e2e.tiny_model import vocabulary
from tests.unit.scheduler.harness import make_setup

pytestmark = pytest.mark.usefixtures("acme")

SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 1, "enforce_eager": True}
ROOT = Path(__file__).parents[2]
URL = "/v1/completions"
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def tokens(llm: LLM, prompts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


def test_a_model_a_policy_and_a_logits_processor_of_another_package_serve_requests_here(models, monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr("quire.engine.named_plugins.logger.info", lambda words, *rest: logged.append(words % rest))
    prompts = [[1], [1, 2, 3, 4], [1, 2]]
    named = {"scheduling_policy": "longest", "logits_processors": ["only"], **SETTINGS}
    with LLM(models["LlamaForCausalLM"], **SETTINGS) as llm:
        usual = tokens(llm, prompts)
    with LLM(models["AcmeForCausalLM"], **named) as llm:
        found = tokens(llm, prompts)
        forced = tokens(llm, prompts[:2], [SamplingParams(max_tokens=3, extra_args={"only": 65}), GREEDY])
        ended = []
        for i, prompt in enumerate(prompts):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, GREEDY)
        while llm.llm_engine.has_unfinished_requests():
            ended += [one.request_id for one in llm.llm_engine.step() if one.finished]
    assert found != usual, "the model's logits are turned round"
    assert forced == [[65] * 3, found[1]]
    assert ended == ["1", "2", "0"], "one row, the longest prompt first"
    (line,) = logged
    for name in ("'AcmeForCausalLM' of acme-quire 1.0", "policy 'longest' of", "processor 'only' of"):
        assert name in line


def test_an_attention_backend_an_executor_and_a_scheduler_of_another_package_run_an_engine(models):
    named = {"attention_backend": "acme_attention", "distributed_executor_backend": "acme_executor"}
    prompts = [[1], [1, 2, 3, 4], list(range(20))]
    with LLM(models["LlamaForCausalLM"], attention_backend="torch_reference", **SETTINGS) as llm:
        usual = tokens(llm, prompts)
    with LLM(models["LlamaForCausalLM"], scheduler_cls="acme_scheduler", **named, **SETTINGS) as llm:
        assert tokens(llm, prompts) == usual
        assert llm.llm_engine.config.cache.block_size == 8, "what the backend prefers"
    from acme_quire.attention import AcmeAttention
    from acme_quire.executor import AcmeExecutor

    assert AcmeAttention.num_calls >= AcmeExecutor.num_steps > 0


def test_plugins_reach_the_process_of_the_engine_core(models):
    named = {"scheduling_policy": "longest", "attention_backend": "acme_attention", **SETTINGS}
    config = build_config(model=models["AcmeForCausalLM"], **named)
    with LLM(models["AcmeForCausalLM"], **named) as llm:
        expected = tokens(llm, [[1], [2, 3]])
    engine = LLMEngine.from_config(config, in_process=False, logits_processors=["only"])
    try:
        found = {}
        engine.add_request("a", {"prompt_token_ids": [1]}, GREEDY)
        engine.add_request("b", {"prompt_token_ids": [2, 3]}, GREEDY)
        engine.add_request("c", {"prompt_token_ids": [3]}, SamplingParams(max_tokens=2, extra_args={"only": 66}))
        while engine.has_unfinished_requests():
            found |= {one.request_id: one.outputs[0].token_ids for one in engine.step()}
    finally:
        engine.shutdown()
    assert found == {"a": expected[0], "b": expected[1], "c": [66, 66]}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduling_policy": "unfinished"}, "'unfinished' of acme-quire 1.0 .* lacks __call__, has_lower_priority"),
        ({"scheduling_policy": "oldest"}, "not one of fcfs, priority, fair, shortest, longest, unfinished"),
        ({"attention_backend": "acme"}, "not one of auto, native_cpu, torch_reference, acme_attention"),
        ({"scheduler_cls": "acme"}, "unknown scheduler_cls 'acme'"),
        ({"logits_processors": ["none"]}, "neither 'module:Class' nor the name of a plugin"),
        (
            {"scheduling_policy": "longest", "flight_recorder": "x"},
            "flight_recorder records Quire's own scheduler only",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_before_any_weight_is_read(models, settings, words, monkeypatch):
    monkeypatch.setattr("quire.worker.worker.load_model", None)
    with pytest.raises(QuireError, match=words):
        LLM(models["LlamaForCausalLM"], **settings)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("Acme2ForCausalLM", "of acme-quire 1.0 .*NotAFamily.* is not derived from ModelFamily"),
        (
            "NobodysForCausalLM",
            "not implemented\nhint: Quire has LlamaForCausalLM, .*, Acme2ForCausalLM, Acme",
        ),
    ],
)
def test_a_model_that_no_usable_plugin_has_is_refused(models, architecture, words):
    with pytest.raises((ConfigError, ModelError), match=words):
        LLM(models[architecture])


def test_a_quantization_and_stat_loggers_are_used_and_one_that_fails_hurts_nobody(models, monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr("quire.engine.stat_loggers.logger.error", lambda words, *rest, **_: logged.append(words % rest))
    with LLM(models["LlamaForCausalLM"], quantization="signs", stat_loggers=["broken", "counter"], **SETTINGS) as llm:
        (found,) = tokens(llm, [[1, 2]])
        (signs,) = llm.apply_model(lambda model: [name for name, _ in model.named_buffers() if name.endswith("signs")])
    from acme_quire.stats import Broken, Counter

    assert len(found) == 4 and "model.layers.0.mlp.down_proj.signs" in signs
    assert (Counter.num_tokens, Broken.num_calls) == (4, 1)
    assert logged == ["stat logger acme_quire.stats:Broken failed and is disabled"]


def test_a_grammar_backend_of_another_package_makes_what_it_declares_and_no_other(models):
    choice = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "nope"]), seed=1)
    regex = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    with LLM(models["LlamaForCausalLM"], structured_outputs_backend="acme_grammar", **SETTINGS) as llm:
        assert llm.generate([[1]], choice, use_tqdm=False)[0].outputs[0].text in ("yes", "nope")
        with pytest.raises(ValidationError, match="not supported by acme_grammar"):
            llm.generate([[1]], regex, use_tqdm=False)


def test_a_batch_reaches_a_logits_processor_by_vllm_xargs_from_the_command_line(models, tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    bodies = {
        "forced": {"prompt": [1], "max_tokens": 2, "vllm_xargs": {"only": 65}},
        "refused": {"prompt": [1], "max_tokens": 2, "vllm_xargs": {"only": "x"}},
    }
    lines = [{"custom_id": name, "method": "POST", "url": URL, "body": body} for name, body in bodies.items()]
    source.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--model", models["AcmeForCausalLM"], "--logits-processors", "only", "--num-gpu-blocks-override", "64"]
    assert main(["run-batch", "-i", str(source), "-o", str(out), *flags]) == 1
    found = {one["custom_id"]: one["response"]["body"] for one in map(json.loads, out.read_text().splitlines())}
    assert found["forced"]["choices"][0]["text"] == vocabulary()[65] * 2
    assert "only is not a token id" in found["refused"]["error"]["message"]


@pytest.mark.parametrize("command", [serve, run_batch])
def test_logits_processors_are_a_flag_of_each_command_that_serves_requests(command):
    parser = QuireParser(prog="quire")
    command.add_arguments(parser)
    given = ["-i", "in", "-o", "out"] if command is run_batch else []
    config = command.configs_from_args(
        parser.parse_args([*given, "--model", "leaf", "--logits-processors", "only", "a.b:C"])
    )[0]
    assert config.model.logits_processors == ("only", "a.b:C")


def test_parsers_of_another_package_are_found_by_name():
    assert tool_call_parser("acme_calls").__name__ == "AcmeCalls"
    assert reasoning_parser("acme_reasoning").__name__ == "AcmeReasoning"


def test_extra_args_that_no_logits_processor_reads_are_refused(models):
    with LLM(models["LlamaForCausalLM"], **SETTINGS) as llm, pytest.raises(ValidationError, match="has none") as caught:
        llm.generate([[1]], SamplingParams(extra_args={"only": 65}))
    assert caught.value.field == "extra_args"


def test_what_is_installed_can_be_listed_and_what_cannot_be_used_has_its_reason(capsys):
    assert main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = (
        "scheduling policy 'longest' of acme-quire 1.0 (acme_quire.scheduling:LongestFirst), "
        "selected by scheduling_policy"
    )
    assert listed in lines and not any("problem" in line for line in lines)
    assert main(["plugins", "--load"]) == 1
    problems = [line for line in capsys.readouterr().out.splitlines() if "problem" in line]
    assert [problem.split()[1:3] for problem in problems] == [["model", "'Acme2ForCausalLM'"], ["scheduling", "policy"]]


def test_the_page_of_plugins_has_a_row_for_each_kind_and_the_example_package_a_plugin_of_each():
    page = (ROOT / "docs/how-to/plugins.md").read_text()
    for kind in KINDS:
        assert f"| {kind.name} | `{kind.group}` | `{kind.setting}`" in page
        assert (f"`{kind.base}`" if kind.base else "no interface for connectors yet") in page
        assert bool(installed(kind)) is bool(kind.base)
        assert kind.contract == 1, "say on the page what changed"


def test_a_recording_makes_quire_load_no_plugin(tmp_path):
    setup = make_setup()
    setup = replace(setup, scheduler=replace(setup.scheduler, scheduling_policy="longest"))
    (tmp_path / "x.qfr").write_bytes(MAGIC + frame(Head(VERSION, "0", "run", 0, 0.0, 0.0, setup, False)))
    with pytest.raises(ValidationError, match="recordings never load code"):
        read_recording(tmp_path / "x.qfr")
