"""Scheduling policies on a real model: they change the order, never an answer."""

from __future__ import annotations

import asyncio

import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.core.tenancy import TenantShare
from quire.engine.async_llm import AsyncLLM
from quire.errors import ConfigError, QueueTimeoutError, QuireError, ValidationError

PROMPTS = [f"Once upon a time there was a fox number {i} " * (1 + i % 4) for i in range(12)]
PARAMS = [
    SamplingParams(max_tokens=8 + 2 * i, temperature=0.8 if i % 2 else 0.0, seed=i, ignore_eos=i % 3 > 0, logprobs=1)
    for i in range(12)
]
SETTINGS = {"max_num_seqs": 3, "num_gpu_blocks_override": 14, "block_size": 16, "num_threads": 1}
TENANTS = [
    TenantShare(name="abc"[i % 3], weight=1.0 + i % 3, policy="shortest" if i % 3 else "fcfs") for i in range(12)
]


def answers(llm: LLM, *, share: bool) -> list[object]:
    engine = llm.llm_engine
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        tenant = {"tenant": TENANTS[i]} if share else {}
        engine.add_request(str(i), prompt, params, **tenant)  # type: ignore[arg-type]
    finished = {}
    while engine.has_unfinished_requests():
        finished.update({int(output.request_id): output for output in engine.step() if output.finished})
    return [finished[i].outputs[0] for i in range(12)]


def test_every_policy_gives_the_same_tokens_and_logprobs_in_few_pages():
    found = {}
    for policy in ("fcfs", "priority", "fair", "shortest"):
        with LLM("leaf", scheduling_policy=policy, **SETTINGS) as llm:
            found[policy] = answers(llm, share=policy == "fair")
    with LLM("leaf", max_num_seqs=12, num_threads=1) as roomy:
        expected = answers(roomy, share=False)
    assert all(one == expected for one in found.values())


def test_offline_a_request_that_waits_too_long_ends_with_that_reason():
    with LLM("leaf", max_num_seqs=1, num_threads=1, queue_timeout=1e-4) as llm:
        first, second = llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
        assert first.outputs[0].finish_reason == "length"
        assert second.outputs[0].finish_reason == "queue_timeout" and second.outputs[0].token_ids == []
        llm.llm_engine.add_request("patient", PROMPTS[0], PARAMS[0], queue_timeout=0)
        assert llm.generate(PROMPTS[1], PARAMS[1], use_tqdm=False)[0].outputs[0].finish_reason == "queue_timeout"


def test_what_is_no_share_is_refused():
    with LLM("leaf", scheduling_policy="fair", num_threads=1) as llm:
        engine = llm.llm_engine
        for tenant, field in (
            (TenantShare(weight=0.0), "tenant.weight"),
            (TenantShare(policy="fifo"), "fifo"),
        ):  # fmt: skip
            with pytest.raises(QuireError) as caught:
                engine.add_request("x", PROMPTS[0], PARAMS[0], tenant=tenant)
            assert caught.value.field == field
        with pytest.raises(ValidationError, match="priority=1 has no effect"):
            engine.add_request("x", PROMPTS[0], PARAMS[0], priority=1)
        engine.add_request("x", PROMPTS[0], PARAMS[0], priority=1, tenant=TenantShare(policy="priority"))
        with pytest.raises(ValidationError, match="queue_timeout"):
            engine.add_request("y", PROMPTS[0], PARAMS[0], queue_timeout=-1.0)
    with pytest.raises(ConfigError, match="scheduling_policy"):
        build_config(model="leaf", scheduling_policy="fairest")


def test_in_a_process_of_its_own_the_engine_ends_one_that_waits_too_long_with_a_typed_error():
    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(build_config(model="leaf", max_num_seqs=1, num_threads=1))
        try:
            long = SamplingParams(max_tokens=200, ignore_eos=True)
            stream = await engine.open_stream(PROMPTS[0], long, "long")
            with pytest.raises(QueueTimeoutError, match="queue_timeout=0.01"):
                async for _ in engine.generate(PROMPTS[1], PARAMS[1], "short", queue_timeout=0.01):
                    pass
            while not (output := await stream.get()).finished:
                pass
            assert output.outputs[0].finish_reason == "length"
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(serve(), 60))
