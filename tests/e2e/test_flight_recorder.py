"""A stretch of real serving is recorded, and replayed without the model to the same schedule."""

from __future__ import annotations

import asyncio
from pathlib import Path

from quire.config.build import build_config
from quire.core.sampling_params import SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.flight_recorder.reader import read_recording
from quire.flight_recorder.replay import Replay
from tests.e2e import serving
from tests.e2e.tiny_model import write_tiny_model


def test_a_stretch_of_serving_replays_to_the_same_schedule(tmp_path: Path):
    model = write_tiny_model(tmp_path / "model", tmp_path / "marker")
    recordings = tmp_path / "recordings"
    requests = serving.make_requests(16, 40)
    config = build_config(
        model=str(model), flight_recorder=str(recordings), scheduling_policy="priority",
        **{**serving.SETTINGS, "num_gpu_blocks_override": 30},
    )  # fmt: skip
    engine = AsyncLLM.from_config(config)

    async def leave_early() -> None:
        prompt = {"prompt_token_ids": list(range(20))}
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True), "left", priority=-1):
            return

    async def serve() -> None:
        await asyncio.gather(serving.stream_all(engine, requests), leave_early())
        await engine.reset_prefix_cache()
        await serving.stream_all(engine, requests[:4], "again")
        deadline = asyncio.get_running_loop().time() + 120
        while len([one for one in ended() if "again" in one]) < 4:  # the writer comes after the engine
            assert asyncio.get_running_loop().time() < deadline, ended()
            await asyncio.sleep(0.05)

    def ended() -> list[str]:
        timelines = Replay(read_recording(recordings)).run().watch.timelines.values()
        return [one.request_id for one in timelines if one.ended_s is not None]

    asyncio.run(serve())
    result = Replay(read_recording(recordings)).run()
    engine.shutdown()
    assert result.first_difference is None
    watch = result.watch
    assert watch.num_steps > 40 and watch.num_preemptions > 0
    assert any(one.finish_reason == "abort" for one in watch.timelines.values())
