"""Scheduling policies on a real model: they change the order, never an answer."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.core.tenancy import TenantShare
from quire.engine.async_llm import AsyncLLM
from quire.errors import ConfigError, QueueTimeoutError, QuireError, ValidationError
from tests.e2e.crowds import COUNT, Found, run
from tests.e2e.tiny_model import write_tiny_model
from tests.effort import effort

PROMPTS = ["Once upon a time there was a fox", "Two and two are"]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TENANTS = [TenantShare(name="one"), TenantShare(name="other", weight=2.0)]
POLICIES = ("fcfs", "priority", "fair", "shortest")
PREEMPTION: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute", "num_gpu_blocks_override": 72},
    "swap": {"preemption_mode": "swap", "swap_space": 0.05, "num_gpu_blocks_override": 48},
}


def wishes(policy: str, i: int) -> dict[str, Any]:
    """What request i says of its turn; tenants have weights and policies of their own."""
    if policy == "priority":
        return {"priority": i % 5}
    if policy == "fair":
        share = TenantShare(name="abc"[i % 3], weight=1.0 + i % 3, policy="shortest" if i % 3 else "fcfs")
        return {"tenant": share}
    return {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    return write_tiny_model(directory / "tiny", directory / "marker")


@pytest.fixture(scope="module")
def in_peace(model: Path) -> Found:
    return run(model, max_num_seqs=COUNT, attention_backend="native_cpu", num_threads=1)


@pytest.mark.parametrize(
    ("policy", "mode"),
    effort(list(zip(POLICIES, [*PREEMPTION] * 2, strict=True)), list(itertools.product(POLICIES, PREEMPTION))),
)
def test_under_every_policy_a_crowd_in_few_pages_gets_the_tokens_and_logprobs_it_gets_in_peace(
    model: Path, in_peace: Found, policy: str, mode: str
):
    found = run(
        model, lambda i: wishes(policy, i), scheduling_policy=policy, max_num_seqs=70,
        scheduler_reserve_full_isl=False, attention_backend="native_cpu", num_threads=1, **PREEMPTION[mode],
    )  # fmt: skip
    assert len(found.answers) >= 100 and found.answers == in_peace.answers
    assert in_peace.num_preemptions == 0 and found.num_preemptions >= (200 if mode == "recompute" else 100)
    assert found.num_swap_preemptions == (found.num_preemptions if mode == "swap" else 0)


def test_offline_prompts_may_belong_to_tenants():
    with LLM("leaf", max_num_seqs=1, num_threads=1, scheduling_policy="fair") as llm:
        alone = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        shared = llm.generate([*PROMPTS, *PROMPTS], PARAMS, tenant=[*TENANTS, *TENANTS], use_tqdm=False)
        assert [one.outputs[0] for one in shared] == [one.outputs[0] for one in [*alone, *alone]]
        names = llm.enqueue([*PROMPTS, *PROMPTS], PARAMS, tenant=TENANTS[:1] * 3 + TENANTS[1:])
        ended: list[str] = []
        while llm.llm_engine.has_unfinished_requests():
            ended += [output.request_id for output in llm.llm_engine.step() if output.finished]
        assert ended.index(names[3]) <= 1, "of two tenants the one that was served less is next"


def test_offline_a_request_that_waits_too_long_ends_with_that_reason():
    with LLM("leaf", max_num_seqs=1, num_threads=1, queue_timeout=1e-4) as llm:
        first, second = llm.generate(PROMPTS, [PARAMS, PARAMS], use_tqdm=False)
        assert first.outputs[0].finish_reason == "length"
        assert second.outputs[0].finish_reason == "queue_timeout" and second.outputs[0].token_ids == []
        assert (
            second.outputs[0].error == "not admitted within queue_timeout=0.0001 s" and first.outputs[0].error is None
        )
        llm.llm_engine.add_request("patient", PROMPTS[0], PARAMS, queue_timeout=0)
        assert llm.generate(PROMPTS[1], PARAMS, use_tqdm=False)[0].outputs[0].finish_reason == "queue_timeout"


def test_what_is_no_share_is_refused():
    with LLM("leaf", scheduling_policy="fair", num_threads=1) as llm:
        engine = llm.llm_engine
        for tenant, field in (
            (TenantShare(weight=0.0), "tenant.weight"),
            (TenantShare(policy="fifo"), "fifo"),
        ):  # fmt: skip
            with pytest.raises(QuireError) as caught:
                engine.add_request("x", PROMPTS[0], PARAMS, tenant=tenant)
            assert caught.value.field == field
        for wrong in (["a", "b"], TENANTS[:1], {"name": "a"}):
            with pytest.raises(ValidationError) as refused:
                llm.generate(PROMPTS, PARAMS, tenant=wrong, use_tqdm=False)  # type: ignore[arg-type]
            assert refused.value.field == "tenant"
        with pytest.raises(ValidationError, match="priority=1 has no effect"):
            engine.add_request("x", PROMPTS[0], PARAMS, priority=1)
        engine.add_request("x", PROMPTS[0], PARAMS, priority=1, tenant=TenantShare(policy="priority"))
        with pytest.raises(ValidationError, match="queue_timeout"):
            engine.add_request("y", PROMPTS[0], PARAMS, queue_timeout=-1.0)
    with pytest.raises(ConfigError, match="scheduling_policy"):
        build_config(model="leaf", scheduling_policy="fairest")


def test_in_a_process_of_its_own_the_engine_ends_one_that_waits_too_long_with_a_typed_error():
    async def serve() -> None:
        engine = AsyncLLM.from_engine_args(build_config(model="leaf", max_num_seqs=1, num_threads=1))
        try:
            long = SamplingParams(max_tokens=200, ignore_eos=True)
            stream = await engine.open_stream(PROMPTS[0], long, "long")
            with pytest.raises(QueueTimeoutError, match="queue_timeout=0.01"):
                async for _ in engine.generate(PROMPTS[1], PARAMS, "short", queue_timeout=0.01):
                    pass
            while not (output := await stream.get()).finished:
                pass
            assert output.outputs[0].finish_reason == "length"
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(serve(), 120))
