"""An engine whose core is another process: the same bytes as in one process, whatever becomes of the core."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchOutput, BeamSearchParams
from quire.config.build import build_config
from quire.core.process_stats import RankUsage
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine import crash_reports
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm_engine import LLMEngine
from quire.engine.process_watch import ProcessWatch
from quire.engine.supervisor import MAX_DEATHS
from quire.errors import EngineDeadError, EngineGenerateError, NotEnoughMemoryError, ValidationError
from quire.utils.report_file import reports_in
from tests.e2e import serving
from tests.e2e.tiny_model import write_tiny_model
from tests.effort import effort

ROOT = Path(__file__).parents[2]
KILLS = effort(1, 3)
LONG = SamplingParams(max_tokens=100, temperature=1.0, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("serving")
    return str(write_tiny_model(root / "model", root / "marker"))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda coroutine: loop.run_until_complete(asyncio.wait_for(coroutine, 600))
    loop.close()


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where engines of this module put their sockets."""
    directory = Path(tempfile.mkdtemp(prefix="q"))
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    yield directory
    tempfile.tempdir = before
    assert not list(directory.iterdir()), "an engine left files behind"
    directory.rmdir()


@pytest.fixture(scope="module")
def engine(model: str, temporary: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_config(build_config(model=model, hang_timeout_s=0.5, **serving.SETTINGS))
    yield engine
    pid = engine.core_pid
    engine.shutdown()
    assert not is_alive(pid)


def test_an_engine_for_servers_has_the_defaults_of_servers(engine: AsyncLLM):
    assert engine.config.scheduler.max_decode_slowdown == 2.0


def test_a_core_shows_what_its_memory_is_for(engine: AsyncLLM, run: Run):
    async def looks() -> list[RankUsage]:
        await engine.check_health()
        watch, deadline = ProcessWatch(engine.core_processes), time.monotonic() + 60
        while not (found := await watch.look()) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return list(found)

    (own,) = run(looks())
    assert own.pid == engine.core_pid and own.rank == 0 and own.rss_bytes > 10 << 20 and own.num_fds > 3
    assert own.memory["kv_cache"] % engine.config.cache.block_size == 0 and own.memory["weights"] > 0
    assert own.memory["huge_pages_asked"] >= own.memory["kv_cache"]


def is_alive(pid: int | None) -> bool:
    assert pid is not None
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.fixture(scope="module")
def requests() -> list[Any]:
    return serving.make_requests(32, 60)


@pytest.fixture(scope="module")
def expected(model: str, requests: list[Any]) -> list[Any]:
    return serving.expected_answers(model, requests)


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_streams_are_the_bytes_of_generate(engine: AsyncLLM, run: Run, requests: list[Any], expected: list[Any]):
    assert run(serving.stream_all(engine, requests)) == expected


@pytest.mark.parametrize(("sign", "count"), [(signal.SIGKILL, KILLS), (signal.SIGSTOP, 1)], ids=["killed", "stopped"])
def test_streams_survive_cores_that_are(
    sign: int, count: int, engine: AsyncLLM, run: Run, requests: list[Any], expected: list[Any]
):
    before = engine.num_restarts
    num_different = run(serving.rounds(engine, requests, expected, count, random.Random(sign), sign))
    assert num_different == 0
    assert engine.num_restarts == before + count


def reports() -> list[Path]:
    directory = crash_reports.default_directory()
    assert directory is not None
    return reports_in(directory)


async def new_report(before: set[Path]) -> set[Path]:
    """That is written beside the restart."""
    while not (new := set(reports()) - before):
        await asyncio.sleep(0.01)
    return new


def test_a_request_says_how_many_restarts_it_outlived(engine: AsyncLLM, run: Run):
    async def ask() -> Any:
        killed = False
        async for output in engine.generate({"prompt_token_ids": [5, 6, 7]}, LONG, "outlives"):
            if not killed:
                assert engine.core_pid is not None and output.metrics.num_restarts == 0
                os.kill(engine.core_pid, signal.SIGKILL)
                killed = True
        return output.metrics

    before, num_reports = set(reports()), engine.core_processes()[0].num_reports
    stats = run(ask())
    (report,) = run(new_report(before))
    run(wait_until(lambda: engine.core_processes()[0].num_reports > num_reports))
    with tarfile.open(report) as archive:
        files = {name.split("/")[1]: archive.extractfile(name) for name in archive.getnames()}
        parts = {name: file.read() for name, file in files.items() if file is not None}
    (request,) = json.loads(parts["requests.json"])
    assert request["id"].startswith("outlives") and request["prompt_tokens"] == 3
    assert json.loads(parts["report.json"])["reason"] == "the process was terminated by SIGKILL"
    assert b"engine core ready" in parts["core.log"]
    assert stats.num_restarts == 1 and stats.num_generation_tokens == 100
    assert 0 < stats.queued_ts <= stats.scheduled_ts <= stats.first_token_ts <= stats.last_token_ts <= stats.output_ts


def test_a_beam_search_outlives_its_core(engine: AsyncLLM, run: Run, model: str):
    prompt, params = [5, 6, 7] * 9, BeamSearchParams(beam_width=3, max_tokens=60, ignore_eos=True)
    with LLM(model, **serving.SETTINGS) as llm:
        (expected,) = llm.beam_search(prompt, params)

    async def search() -> BeamSearchOutput:
        num_steps = 0

        def kill(step: object) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 20:
                assert engine.core_pid is not None
                os.kill(engine.core_pid, signal.SIGKILL)

        engine.step_listeners.append(kill)
        try:
            return await engine.beam_search(prompt, params, "beams")
        finally:
            engine.step_listeners.remove(kill)

    num_restarts = engine.num_restarts
    assert run(search()) == expected
    assert engine.num_restarts == num_restarts + 1


def test_an_engine_serves_one_event_loop(engine: AsyncLLM):
    with pytest.raises(EngineDeadError, match="another event loop"):
        asyncio.run(serving.stream(engine, "elsewhere", [1], LONG))


def test_leaving_a_stream_ends_its_request_within_two_steps(engine: AsyncLLM, run: Run):
    async def leave() -> int:
        reader = engine.generate([1, 2, 3], LONG, "left")
        await anext(reader)
        step = engine.last_stats.step
        await reader.aclose()
        other = engine.generate([1, 2, 3], LONG, "stays")
        async for _ in other:
            if engine.last_stats.num_running == 1 and engine.last_stats.step > step + 1:
                break
        taken = engine.last_stats.step - step
        await other.aclose()
        await wait_until(lambda: engine.last_stats.num_running == 0)
        assert engine.last_stats.kv_cache_usage == 0.0
        return taken

    assert run(leave()) < 40


def test_a_cancelled_reader_ends_its_request(engine: AsyncLLM, run: Run):
    async def cancel() -> None:
        task = asyncio.ensure_future(serving.stream(engine, "cancelled", [1, 2], LONG))
        await wait_until(lambda: engine.last_stats.num_running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait_until(lambda: engine.last_stats.num_running == 0)
        assert await engine.reset_prefix_cache()

    run(cancel())


def test_an_aborted_request_gets_its_final_output(engine: AsyncLLM, run: Run):
    async def abort() -> list[str | None]:
        reasons: list[str | None] = []
        params = LONG.clone()
        params.n = 2
        async for output in engine.generate(list(range(40)), params, "aborted"):
            reasons += [one.finish_reason for one in output.outputs]
            await engine.abort("aborted")
        await engine.abort(["aborted", "never heard of"])
        return reasons

    assert run(abort()).count("abort") == 2


def test_a_slow_reader_gets_merged_deltas(engine: AsyncLLM, run: Run):
    async def read_slowly() -> tuple[int, list[int]]:
        num_outputs, token_ids = 0, []
        async for output in engine.generate([5, 6], LONG, "slow"):
            num_outputs += 1
            token_ids += output.outputs[0].token_ids
            if num_outputs == 1:
                await wait_until(lambda: engine.last_stats.num_running == 0)
        return num_outputs, token_ids

    async def read() -> list[int]:
        return (await serving.stream(engine, "quick", [5, 6], LONG))[0][2]

    num_outputs, token_ids = run(read_slowly())
    assert num_outputs == 2
    assert token_ids == run(read())


def test_a_reader_that_raises_costs_no_other_stream_anything(engine: AsyncLLM, run: Run):
    async def read() -> tuple[list[int], list[int]]:
        broken = await engine.open_stream([5, 6], LONG, "broken")
        broken.on_ready = lambda: 1 // 0
        other = (await serving.stream(engine, "other", [5, 6], LONG))[0][2]
        assert await serving.stream(engine, "broken", [5, 6], LONG), "its name is free again"
        return other, (await serving.stream(engine, "alone", [5, 6], LONG))[0][2]

    found, alone = run(read())
    assert found == alone


def test_requests_wait_through_a_pause_even_when_the_core_stops(engine: AsyncLLM, run: Run):
    async def pause() -> None:
        reader = engine.generate([9, 9], LONG, "paused")
        await anext(reader)
        await engine.pause_generation()
        assert engine.is_paused
        step = engine.last_stats.step
        waiting = asyncio.ensure_future(anext(engine.generate([8, 8], LONG, "new")))
        await engine.check_health()
        os.kill(engine.core_pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        await wait_until_healthy(engine)
        assert engine.last_stats.step <= step
        assert not waiting.done()
        await engine.resume_generation()
        await waiting
        assert not engine.is_paused
        assert [output async for output in reader][-1].finished

    run(pause())


async def wait_until_healthy(engine: AsyncLLM) -> None:
    while True:
        try:
            return await engine.check_health()
        except EngineDeadError:
            await asyncio.sleep(0.05)


def test_a_request_that_cannot_run_is_refused_alone(engine: AsyncLLM, run: Run):
    async def refuse() -> None:
        other = asyncio.ensure_future(serving.stream(engine, "other", [1], LONG))
        for prompt, params, salt in (
            ([1] * 500, LONG, None), ([1], SamplingParams(logit_bias={9999: 1.0}), None), ([1], LONG, "a/b"),
        ):  # fmt: skip
            with pytest.raises(ValidationError):
                async for _ in engine.generate(prompt, params, "refused", cache_salt=salt):
                    pass
        assert len((await other)[0][2]) == 100

    run(refuse())


def test_an_engine_that_is_stepped_can_have_its_core_apart(model: str, temporary: Path, expected: list[Any]):
    engine = LLMEngine.from_config(build_config(model=model, **serving.SETTINGS), in_process=False)
    try:
        with pytest.raises(ValidationError):
            engine.add_request("bad", [1] * 500, SamplingParams())
        requests = serving.make_requests(32, 60)[:6]
        for i, (prompt, params) in enumerate(requests):
            params = params.clone()
            params.output_kind = RequestOutputKind.FINAL_ONLY
            engine.add_request(str(i), prompt, params)
        found = {}
        while engine.has_unfinished_requests():
            found |= {output.request_id: serving.answers_of(output) for output in engine.step()}
        assert [found[str(i)] for i in range(6)] == expected[:6]
        assert engine.reset_prefix_cache()
        engine.add_request("lost", [1], LONG)
        os.kill(engine._client._core.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            while engine.has_unfinished_requests():
                engine.step()
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def evil(model: str, temporary: Path) -> Iterator[AsyncLLM]:
    """An engine in which a request can fail on purpose, and with a small KV cache."""
    config = build_config(model=model, **{**serving.SETTINGS, "num_gpu_blocks_override": 6})
    engine = AsyncLLM.from_config(config, logits_processors=["tests.e2e.evil_processor:Evil"])
    yield engine
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(serving.stream(engine, "late", [1], LONG))


async def beside(engine: AsyncLLM, requests: list[Any], wishes: dict[str, int]) -> tuple[list[Any], Any]:
    """Answers of `requests`, and what becomes of a request with `wishes` that comes first."""
    params = LONG.clone()
    params.extra_args, params.max_tokens = wishes, 20
    found = await asyncio.gather(
        serving.stream(engine, "evil", [4, 4], params), serving.stream_all(engine, requests), return_exceptions=True
    )
    return found[1], found[0]


def test_what_the_core_refuses_is_that_requests_error(evil: AsyncLLM, run: Run):
    with pytest.raises(ValidationError, match="KV cache") as caught:
        run(serving.stream(evil, "large", [1] * 40, LONG))
    assert caught.value.field == "max_tokens"


def test_a_request_whose_step_raises_ends_alone(evil: AsyncLLM, run: Run, requests: list[Any], expected: list[Any]):
    found, error = run(beside(evil, requests[:12], {"raise_at": 5}))
    assert isinstance(error, EngineGenerateError)
    assert "token 5 is too much" in error.message
    assert found == expected[:12]
    assert evil.num_restarts == 0


@pytest.mark.parametrize("token", effort([2], [0, 5]))
def test_a_request_that_kills_its_core_ends_alone(
    evil: AsyncLLM, run: Run, requests: list[Any], expected: list[Any], token: int
):
    before = evil.num_restarts
    found, error = run(beside(evil, requests[:2], {"exit_at": token}))
    assert isinstance(error, EngineGenerateError)
    assert f"stopped {MAX_DEATHS} times" in error.message
    assert found == expected[:2]
    # Deaths in a row without a token from it. Each of its five tokens may take a death of its own before that,
    # as what a core sends last is lost with it, and with others to suspect one death more is spent on them.
    num_deaths = evil.num_restarts - before
    assert num_deaths == MAX_DEATHS if token == 0 else MAX_DEATHS <= num_deaths <= MAX_DEATHS + token + 1


def test_in_one_process_too_a_request_whose_step_raises_ends_alone(
    model: str, requests: list[Any], expected: list[Any]
):
    params = LONG.clone()
    params.extra_args = {"raise_at": 5}
    prompts, others = [[4, 4], *(one for one, _ in requests[:12])], [one for _, one in requests[:12]]
    with LLM(model, logits_processors=["tests.e2e.evil_processor:Evil"], **serving.SETTINGS) as llm:
        outputs = llm.generate(prompts, [params, *others], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert len(outputs[0].outputs[0].token_ids) == 5
    assert [serving.answers_of(output) for output in outputs[1:]] == expected[:12]


def test_what_keeps_a_core_from_starting_is_raised_as_it_was(model: str, temporary: Path):
    with pytest.raises(NotEnoughMemoryError) as caught:
        AsyncLLM.from_config(build_config(model=model, kv_cache_memory_bytes=2**50))
    assert caught.value.hint


def test_a_core_ends_with_its_parent(model: str, temporary: Path):
    code = f"""
        import os, signal, tempfile
        tempfile.tempdir = {str(temporary)!r}
        from quire.config.build import build_config
        from quire.engine.async_llm import AsyncLLM
        engine = AsyncLLM.from_config(build_config(model={model!r}))
        os.kill(engine.core_pid, signal.SIGSTOP)
        print(engine.core_pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    deadline = time.monotonic() + 60
    while is_alive(int(result.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(int(result.stdout))
