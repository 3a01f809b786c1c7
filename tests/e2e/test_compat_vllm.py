"""Programs as users write them for vLLM, only the imports changed: an engine by hand, on an event loop, in one call."""

from __future__ import annotations

import asyncio

import pytest

from quire.compat.vllm import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from quire.compat.vllm.config import CompilationConfig
from quire.compat.vllm.distributed import cleanup_dist_env_and_memory
from quire.compat.vllm.engine.arg_utils import AsyncEngineArgs
from quire.compat.vllm.inputs import TextPrompt, TokensPrompt
from quire.compat.vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from quire.compat.vllm.utils import FlexibleArgumentParser, random_uuid
from quire.compat.vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from quire.errors import UnsupportedError, ValidationError

FLAGS = ["--model", "leaf", "--max_model_len", "256", "--max-num-seqs", "8", "--num-gpu-blocks-override", "200"]


class OnlyToken(AdapterLogitsProcessor):
    """As vLLM's example: requests with a target token get nothing else."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        target = (params.extra_args or {}).get("target_token")

        def only(output_ids, logits):
            kept = logits[target].item()
            logits[:] = float("-inf")
            logits[target] = kept
            return logits

        return None if target is None else only


@pytest.fixture(scope="module")
def args() -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description="a program"))
    return EngineArgs.from_cli_args(parser.parse_args(FLAGS))


def test_an_engine_stepped_by_hand(args):
    engine = LLMEngine.from_engine_args(args)
    prompts = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("What is the meaning of life?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
    ]
    finished: list[RequestOutput] = []
    while prompts or engine.has_unfinished_requests():
        if prompts:
            engine.add_request(random_uuid(), *prompts.pop(0))
        finished += [output for output in engine.step() if output.finished]
    assert sorted(len(output.outputs) for output in finished) == [1, 2]
    with pytest.raises(UnsupportedError, match="lora_request"):
        engine.add_request("x", "a", SamplingParams(), lora_request=object())
    assert engine.vllm_config.cache_config is engine.config.cache and engine.vllm_config.parallel_config.num_ranks == 1
    engine.do_log_stats()
    engine.shutdown()
    cleanup_dist_env_and_memory()


def test_one_call_with_every_kind_of_prompt_and_a_processor_of_vllms(args):
    values = dict(args) | {"logits_processors": [OnlyToken], "compilation_config": CompilationConfig(level=3)}
    with LLM(**values) as llm:
        assert llm.model_config.max_model_len == llm.llm_engine.model_config.max_model_len == 256
        params = [
            SamplingParams(temperature=0, max_tokens=4, extra_args={"target_token": 128}),
            SamplingParams(
                temperature=0, max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
            ),
            SamplingParams(temperature=0, max_tokens=4, extra_args={"target_token": 67}),
        ]
        outputs = llm.generate([TextPrompt(prompt="Hello"), "Is it?", TokensPrompt(prompt_token_ids=[5, 6])], params)
        assert [output.outputs[0].token_ids for output in outputs[::2]] == [[128] * 4, [67] * 4]
        assert outputs[1].outputs[0].text in ("yes", "no")


def test_streams_on_an_event_loop_stop_pause_and_end():
    async def use(engine: AsyncLLMEngine) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA, skip_clone=True)
        stream = engine.generate(prompt="Once", sampling_params=params, request_id="a")
        assert sum([len(output.outputs[0].token_ids) async for output in stream]) == 8
        added = await engine.add_request("b", "Once", params)
        assert [output async for output in added][-1].finished
        added = await engine.add_request("c", "Once", params.clone())
        await engine.pause_generation(mode="keep")
        await engine.resume_generation()
        assert [output async for output in added][-1].finished
        await engine.pause_generation(mode="wait")
        with pytest.raises(ValidationError, match="while the engine is paused"):
            await engine.pause_generation(mode="wait")
        await engine.resume_generation()
        assert engine.is_running and not engine.is_stopped and engine.vllm_config.model_config is engine.model_config
        assert (await engine.get_model_config()).max_model_len == 256 and await engine.list_loras() == set()
        assert await engine.get_supported_tasks() == ("generate",) and not await engine.is_tracing_enabled()
        with pytest.raises(ValidationError, match=r"no directory\nhint: set profile="):
            await engine.start_profile()
        await engine.do_log_stats()
        assert engine.get_tokenizer().apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        with pytest.raises(UnsupportedError, match="AsyncLLM.add_lora: LoRA adapters are not supported"):
            await engine.add_lora(None)
        long = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        added = await engine.add_request("d", "Once", long)
        await engine.abort("d")
        assert (await added.get()).outputs[0].finish_reason == "abort"
        added = await engine.add_request("e", "Once", long)
        await engine.pause_generation()
        assert (await added.get()).outputs[0].finish_reason == "abort"
        await engine.resume_generation()

    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model="leaf", max_model_len=256, enforce_eager=True))
    try:
        asyncio.run(use(engine))
    finally:
        engine.shutdown()
