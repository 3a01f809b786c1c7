"""Forced calls after thinking in an engine: valid, and the same bytes in a crowd, when preempted, in a new core."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

from quire import LLM
from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from tests.effort import effort
from tests.structured.forced_tools import Asked, Forcing, run, with_control_tokens
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries
FORMATS = ("hermes", "mistral", "qwen3_coder")


def thinking_requests(engine: Any, count: int) -> list[Asked]:
    """Requests whose answers may think; a budget ends that."""
    forcing, rng = Forcing(engine, FORMATS), random.Random(3)
    return [one for one in (forcing.request(rng) for _ in range(5 * count)) if one.budget is not None][:count]


def test_forced_calls_are_valid_whatever_the_weights_and_the_marks():
    with with_control_tokens() as directory:
        llm = LLM(model=directory, load_format="dummy", max_model_len=1024, max_num_seqs=32)
        ends, violations = run(llm, effort(16, 40), 7, FORMATS)
        llm.llm_engine.shutdown()
    assert not violations, violations
    assert ends["tool_calls"] > effort(4, 10)


def test_answers_that_think_first_are_the_same_alone_and_preempted():
    small = LLM(num_gpu_blocks_override=60, block_size=16, max_num_seqs=16, max_model_len=512)
    asked = thinking_requests(small.llm_engine, effort(6, 10))
    prompts = [{"prompt_token_ids": one.prompt} for one in asked]
    crowd = [one.outputs[0] for one in small.generate(prompts, [one.params for one in asked], use_tqdm=False)]
    alone = [small.generate(p, one.params, use_tqdm=False)[0].outputs[0] for p, one in zip(prompts, asked, strict=True)]
    small.llm_engine.shutdown()
    assert [one.token_ids for one in crowd] == [one.token_ids for one in alone]


def test_thinking_and_calls_go_on_in_a_new_core():
    async def answers() -> tuple[list[str], list[str], int]:
        engine = AsyncLLM.from_config(build_config(max_model_len=512))
        try:
            asked = thinking_requests(engine, effort(3, 6))
            started = asyncio.Event()

            async def text(name: str, one: Asked) -> str:
                async for output in engine.generate({"prompt_token_ids": one.prompt}, one.params, name):
                    started.set()
                    last = output.outputs[0]
                return last.text

            undisturbed = [await text(f"alone-{index}", one) for index, one in enumerate(asked)]
            started.clear()
            running = asyncio.gather(*(text(str(index), one) for index, one in enumerate(asked)))
            await started.wait()
            assert engine.core_pid is not None
            os.kill(engine.core_pid, signal.SIGKILL)
            return undisturbed, list(await running), engine.num_restarts
        finally:
            engine.shutdown()

    undisturbed, texts, num_restarts = asyncio.run(answers())
    assert num_restarts == 1 and texts == undisturbed
