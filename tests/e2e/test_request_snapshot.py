"""A request that begins on one engine and goes on on another has the bytes of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from quire import SamplingParams
from quire.config.build import build_config
from quire.core.request_snapshot import RequestSnapshot, snapshot_from
from quire.core.sampling_params import RequestOutputKind
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.async_llm import AsyncLLM
from quire.errors import ValidationError

PROMPT = {"prompt_token_ids": [(i * 37) % 900 + 5 for i in range(40)]}
CASES = {
    "drawn": SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True, frequency_penalty=0.3),
    "with a grammar": SamplingParams(
        temperature=1.0, max_tokens=48, structured_outputs=StructuredOutputsParams(regex="([a-c]{3} ){40}")
    ),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_config(build_config(model="leaf", max_model_len=256, num_gpu_blocks_override=80))
    yield engine
    engine.shutdown()


def test_snapshots_of_running_requests_are_continued_with_the_same_bytes(engine: AsyncLLM) -> None:
    asyncio.run(_check(engine))


async def _check(engine: AsyncLLM) -> None:
    for name, params in CASES.items():
        taken: list[bytes] = []
        async for output in engine.generate(PROMPT, params, name):
            if len(output.outputs[0].token_ids) >= 7 and not taken and not output.finished:
                taken.append(engine.snapshot(name).to_json())
        whole = output.outputs[0]
        snapshot = snapshot_from(msgspec.json.decode(taken[0]))
        num_before = len(snapshot.output_token_ids)
        assert 7 <= num_before < len(whole.token_ids)
        async for output in engine.resume(snapshot, f"{name} again"):
            rest = output.outputs[0]
        assert (rest.token_ids, rest.text) == (whole.token_ids, whole.text), name
        assert rest.finish_reason == whole.finish_reason
        deltas = msgspec.structs.replace(snapshot.sampling_params, output_kind=RequestOutputKind.DELTA)
        tokens: list[int] = []
        async for output in engine.resume(msgspec.structs.replace(snapshot, sampling_params=deltas), f"{name} deltas"):
            tokens += output.outputs[0].token_ids
        assert tokens == whole.token_ids[num_before:], "what came before is not sent again"
    for change, words in (
        ({"model": "another"}, "is of model 'another'"),
        ({"output_token_ids": [1] * 48}, "its answer has 48 tokens"),
        ({"output_token_ids": [10**7]}, "not in the vocabulary"),
        ({"seed": -1}, "its seed"),
    ):
        with pytest.raises(ValidationError, match=words) as error:
            async for _ in engine.resume(msgspec.structs.replace(snapshot, **change), "refused"):  # type: ignore[arg-type]
                pass
        assert error.value.field == "snapshot" and error.value.hint
    with pytest.raises(ValidationError, match="has no snapshot"):
        engine.snapshot("nothing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"output_token_ids": "x"}, "output_token_ids"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"more": 1}, "unknown field"),
        ({"prompt_token_ids": None}, "prompt_token_ids"),
    ],
)
def test_what_is_no_snapshot_is_refused_by_its_field(change: dict[str, Any], words: str) -> None:
    good = RequestSnapshot(
        model="leaf",
        request_id="r",
        prompt_token_ids=[1],
        output_token_ids=[],
        seed=1,
        sampling_params=SamplingParams(),
    )
    assert snapshot_from(good.to_json()) == good
    with pytest.raises(ValidationError, match=words) as error:
        snapshot_from({**msgspec.json.decode(good.to_json()), **change})
    assert error.value.field == "snapshot"
