"""A core that is killed while it writes structured answers: they go on, in their form, with the tokens they had."""

from __future__ import annotations

import asyncio
import os
import signal

from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from tests.structured.libraries import needs_libraries
from tests.structured.test_answers import FORMS, PROMPT, has_form, params

pytestmark = needs_libraries


def test_structured_answers_outlive_their_core():
    async def run() -> tuple[list[str], list[str], int]:
        engine = AsyncLLM.from_config(build_config(max_model_len=256))
        try:

            async def text(request_id: str, form: str) -> str:
                async for output in engine.generate(PROMPT, params(FORMS[form], seed=3), request_id):
                    started.set()
                    last = output.outputs[0]
                assert last.finish_reason == "stop"
                return last.text

            started = asyncio.Event()
            undisturbed = [await text(f"alone-{form}", form) for form in FORMS]
            started.clear()
            answers = asyncio.gather(*(text(form, form) for form in FORMS))
            await started.wait()
            pid = engine.core_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            return undisturbed, list(await answers), engine.num_restarts
        finally:
            engine.shutdown()

    undisturbed, answers, num_restarts = asyncio.run(run())
    assert num_restarts == 1 and answers == undisturbed
    assert all(has_form(FORMS[form], text) for form, text in zip(FORMS, answers))
