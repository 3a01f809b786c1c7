"""A package adds each kind of plugin, and no file of Quire changes: `tests/plugins/acme` in engines and servers."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError, ModelError, QuireError

pytestmark = pytest.mark.usefixtures("acme")

SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_num_seqs": 1, "enforce_eager": True}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def tokens(llm: LLM, prompts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in llm.generate(prompts, params, use_tqdm=False)]


def test_a_model_a_policy_and_a_logits_processor_of_another_package_serve_requests_here(models, capfd):
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
    (line,) = [line for line in capfd.readouterr().err.splitlines() if ": plugins: " in line]
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
        ({"scheduling_policy": "unfinished"}, "'unfinished' of acme-quire 1.0 .* does not have __call__, is_laxer"),
        ({"scheduling_policy": "oldest"}, "not one of fcfs, priority, fair, shortest, longest, unfinished"),
        ({"attention_backend": "acme"}, "not one of auto, native_cpu, torch_reference, acme_attention"),
        ({"scheduler_cls": "acme"}, "unknown scheduler_cls 'acme'"),
        ({"logits_processors": ["none"]}, "neither 'module:Class' nor the name of a plugin"),
        ({"scheduling_policy": "longest", "flight_recorder": "x"}, "flight_recorder writes down the state of Quire's"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused_before_any_weight_is_read(models, settings, words, monkeypatch):
    monkeypatch.setattr("quire.worker.worker.load_model", None)
    with pytest.raises(QuireError, match=words):
        LLM(models["LlamaForCausalLM"], **settings)


def test_a_plugin_that_the_process_of_the_core_cannot_use_is_told_here(models):
    config = build_config(model=models["LlamaForCausalLM"], scheduling_policy="unfinished")
    with pytest.raises(ConfigError, match="'unfinished' of acme-quire 1.0 .* does not have __call__"):
        LLMEngine.from_config(config, in_process=False)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("Acme2ForCausalLM", "of acme-quire 1.0 .*NotAFamily.* is not derived from ModelFamily"),
        ("NobodysForCausalLM", "not implemented\nhint: Quire has LlamaForCausalLM, .*, Acme2ForCausalLM, Acme"),
    ],
)
def test_a_model_that_no_usable_plugin_has_is_refused(models, architecture, words):
    with pytest.raises((ConfigError, ModelError), match=words):
        LLM(models[architecture])
