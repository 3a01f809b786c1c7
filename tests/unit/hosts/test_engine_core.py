"""An engine core behind front ends of vLLM's: a real process, with the protocol spoken from here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from quire import LLM, SamplingParams
from quire.hosts.engine_core.links import FrontEndLinks
from quire.hosts.engine_core.messages import Addresses
from tests.robustness.server_process import children_of
from tests.unit.hosts.front_end import FrontEnds, array_of

PROMPT = [12, 524, 285, 750, 300, 301]
CASES: dict[str, dict] = {
    "greedy": {"temperature": 0.0, "max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1},
    "seeded": {"seed": 7, "max_tokens": 12, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"seed": 8, "max_tokens": 12, "presence_penalty": 1.0, "frequency_penalty": 0.5,
                  "repetition_penalty": 1.2, "logit_bias": {300: 3.0}, "logprobs": 0},
    "masked": {"temperature": 0.0, "max_tokens": 12, "allowed_token_ids": [300, 301, 302, 524], "min_tokens": 5},
    "choice": {"seed": 9, "max_tokens": 12, "structured_outputs": {"choice": ["red", "blue"]}},
    "words": {"temperature": 0.0, "max_tokens": 12, "bad_words_token_ids": [[524], [285, 750], [300, 301]]},
    "stopped": {"seed": 10, "max_tokens": 40, "stop_token_ids": list(range(300, 1000))},
}  # fmt: skip
BY_ANOTHER_NAME = {"bad_words_token_ids": "_bad_words_token_ids"}
LONG = {"seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnds]:
    ends = FrontEnds(num_clients=2)
    try:
        ends.start("leaf", "--num-gpu-blocks-override", "128", "--max-num-seqs", "8")
        yield ends
        end_by_a_signal(ends)
    finally:
        ends.close()


def end_by_a_signal(front: FrontEnds) -> None:
    """What runs ends with reason abort, and the process without an error."""
    front.add("last of all", PROMPT, max_tokens=1900, **LONG)
    while all(output[0] != "last of all" for output in front.take(front.outputs[0])[0][1]):
        pass  # figures of earlier steps may still be on their way
    front.process.send_signal(signal.SIGTERM)
    assert front.outputs_of("last of all")["last of all"][-1][5] == 2
    _, log = front.process.communicate(timeout=60)
    assert front.process.returncode == 0 and "Traceback" not in log, log


def test_requests_get_the_tokens_and_numbers_of_a_program_that_uses_the_engine_itself(front):
    assert front.ready["max_model_len"] == 2048 and front.ready["num_gpu_blocks"] == 128
    assert front.ready["kv_cache_size_tokens"] == 127 * front.ready["block_size"] and not front.ready["supports_lora"]
    for name, params in CASES.items():
        # What vLLM adds for itself or leaves to its front end is there, too.
        params = {BY_ANOTHER_NAME.get(field, field): value for field, value in params.items()}
        front.add(name, PROMPT, output_kind=2, _all_stop_token_ids=[1], skip_clone=True, stop=["x"], **params)
    found = front.outputs_of(*CASES)
    llm = LLM("leaf", num_gpu_blocks_override=128, max_num_seqs=8)
    for name, params in CASES.items():
        outputs = found[name]
        (expected,) = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(**params), use_tqdm=False)
        completion = expected.outputs[0]
        assert [token for one in outputs for token in one[1]] == list(completion.token_ids), name
        assert outputs[-1][5] == ("stop", "length").index(completion.finish_reason)
        assert outputs[-1][6] == completion.stop_reason
        if completion.logprobs is not None:
            wide = [array_of(one[2][1])[0] for one in outputs if one[2] is not None]
            ranks = [int(array_of(one[2][2])[0]) for one in outputs if one[2] is not None]
            assert all(len(line) == params["logprobs"] + 1 for line in wide)
            sampled = [line[token] for line, token in zip(completion.logprobs, completion.token_ids)]
            assert [float(line[0]) for line in wide] == [one.logprob for one in sampled]
            assert ranks == [one.rank for one in sampled]
    prompt_lines = next(one[3] for one in found["greedy"] if one[3] is not None)
    assert array_of([*prompt_lines[0][:1], *prompt_lines[0][1:]]).shape == (len(PROMPT) - 1, 2)
    assert array_of(prompt_lines[0])[:, 0].tolist() == PROMPT[1:]
    first = found["seeded"][0]
    assert [event["type"] for event in first[7]] == [1, 2] and first[11]["num_prompt_tokens"] == len(PROMPT)
    assert all(one[11] is None and one[7] is None for one in found["seeded"][1:])
    assert front.stats["num_running_reqs"] == 0 and front.stats["prefix_cache_stats"]["hits"] == 0


def test_what_is_wrong_with_a_message_ends_its_request_alone(front):
    front.add("long", PROMPT, max_tokens=120, **LONG)
    undisturbed = front.tokens_of("long")
    front.add("beside", PROMPT, max_tokens=120, **LONG)
    wrong = {
        "vocabulary": ([10**6], {}, {}),
        "empty": ([], {}, {}),
        "no prompt": (None, {}, {}),
        "images": (PROMPT, {"mm_features": [{"data": 1}]}, {}),
        "pooling": (PROMPT, {"pooling_params": {"task": "embed"}}, {}),
        "lora": (PROMPT, {"lora_request": ["a", 1, "/a"]}, {}),
        "rank": (PROMPT, {"data_parallel_rank": 3}, {}),
        "kind": ("text", {}, {}),
        "client": (PROMPT, {"priority": "high"}, {}),
        "temperature": (PROMPT, {}, {"temperature": -1.0}),
        "unknown": (PROMPT, {}, {"sharpness": 3}),
        "not yet": (PROMPT, {}, {"repetition_detection": {"max_pattern_size": 3}}),
        "words": (PROMPT, {}, {"bad_words": ["a"], "_bad_words_token_ids": [["a"]]}),
        "schema": (PROMPT, {}, {"structured_outputs": {"json": "{"}}),
        "seeds": (PROMPT, {}, {"seed": "many"}),
        "stops": (PROMPT, {}, {"stop_token_ids": 5, "_eos_token_id": 7}),
        "ends": (PROMPT, {}, {"_eos_token_id": "two"}),
        "beams": (PROMPT, {}, {"beam_search": {"num_beams": 2}}),
        "internal": (PROMPT, {}, {"reasoning": [1]}),
    }
    for name, (prompt, fields, params) in wrong.items():
        front.add(name, prompt, fields=fields, **params)
    for payload in (b"\xc1", b"", b"\x93", msgspec.msgpack.encode({"request_id": "map"}), b"\x81" * 5000):
        for kind in (b"\0", b"\1", b"\3", b"\7", b""):
            front.send(kind, payload)
    front.send(b"\0")
    front.add("beside", PROMPT, max_tokens=1)  # the name is taken
    found = front.outputs_of("beside", *wrong)
    assert [token for one in found["beside"] for token in one[1]] == undisturbed
    for name in wrong:
        (output,) = found[name]
        assert output[5] == 3 and output[18]["code"] == "validation_error" and output[18]["message"], name
    assert "sharpness" in found["unknown"][0][18]["message"]


def test_a_core_that_is_killed_is_replaced_and_its_requests_go_on_as_if_nothing_had_happened(front):
    front.add("undisturbed", PROMPT, max_tokens=400, **LONG)
    undisturbed = front.tokens_of("undisturbed")
    front.add("killed", PROMPT, max_tokens=400, logprobs=0, **LONG)
    front.add("other", PROMPT, max_tokens=400, client=1, **LONG)
    first = front.take(front.outputs[0])[0]
    (core,) = (pid for pid in children_of(front.process.pid) if b"core_proc" in _command(pid))
    os.kill(core, signal.SIGKILL)
    rest = front.outputs_of("killed")["killed"]
    outputs = [one for one in first[1] if one[0] == "killed"] + rest
    assert [token for one in outputs for token in one[1]] == undisturbed
    assert front.tokens_of("other", client=1) == undisturbed
    assert sum(len(array_of(one[2][1])) for one in outputs if one[2] is not None) == 400


def test_requests_end_when_their_front_end_wants_no_more_of_them(front):
    front.add("wanted", PROMPT, max_tokens=60, **LONG)
    front.add("unwanted", PROMPT, max_tokens=1500, **LONG)
    front.send(b"\1", ["unwanted", "never"])
    front.add("at once", PROMPT, max_tokens=1500, fields={"abort_immediately": True}, **LONG)
    found = front.outputs_of("wanted", "at once")
    assert found["at once"][-1][5] == 2
    assert all(one[5] is None for one in found.get("unwanted", []))
    front.add("last", PROMPT, max_tokens=2, **LONG)
    front.outputs_of("last")
    assert front.stats["num_running_reqs"] == 0


def test_calls_are_answered_or_refused_by_name(front):
    assert front.call("get_supported_tasks") == ["generate"]
    assert front.call("is_sleeping") is False and front.call("list_loras", client=1) == []
    assert front.call("reset_prefix_cache", True, False) is True
    assert front.call("pause_generation", "keep", True) is None and front.call("resume_generation") is None
    for method, args, part in (
        ("add_lora", [{}], "LoRA"), ("sleep", [1, "abort"], "level"), ("collective_rpc", ["a"], "workers"),
        ("shutdown_now", [], "shutdown_now"), ("pause_scheduler", ["often", True], "often"),
        ("is_sleeping", [1, 2, 3], "arguments"), ("reset_prefix_cache", ["yes"], "true or false"),
    ):  # fmt: skip
        assert part in front.call(method, *args)[1]


def test_a_pause_keeps_waits_for_or_ends_what_runs_and_what_comes_waits(front):
    front.add("kept", PROMPT, max_tokens=200, **LONG)
    assert front.call("pause_scheduler", "keep", False) is None and front.call("is_scheduler_paused") is True
    front.add("later", PROMPT, max_tokens=3, **LONG)
    front.add("gone", PROMPT, max_tokens=3, **LONG)
    front.send(b"\1", ["gone"])
    assert front.call("resume_scheduler") is None
    found = front.outputs_of("kept", "later")
    assert "gone" not in found and found["kept"][-1][5] == 1
    front.add("waited for", PROMPT, max_tokens=30, **LONG)
    front.send(b"\3", [0, 5, "pause_scheduler", ["wait", True]])
    assert front.outputs_of("waited for")["waited for"][-1][5] == 1
    assert front.take(front.outputs[0])[0][4] == [5, None, [None, None]] and front.call("wake_up") is True
    front.add("ended", PROMPT, max_tokens=1500, **LONG)
    front.send(b"\3", [0, 6, "sleep", [0]])
    assert front.outputs_of("ended")["ended"][-1][5] == 2
    while front.take(front.outputs[0])[0][4] is None:
        pass
    assert front.call("wake_up", None) is True


def test_a_front_end_that_goes_away_is_noticed():
    async def wait() -> None:
        context = zmq.Context()
        sockets = [context.socket(kind) for kind in (zmq.ROUTER, zmq.PULL)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
        links = FrontEndLinks(Addresses([f"tcp://127.0.0.1:{ports[0]}"], [f"tcp://127.0.0.1:{ports[1]}"]))
        watch = asyncio.create_task(links.wait_until_gone(0, gone_s=1.0))
        await asyncio.sleep(0.1)
        assert not watch.done()
        context.destroy(linger=0)
        await watch
        links.close()
        absent = FrontEndLinks(Addresses([f"tcp://127.0.0.1:{ports[0]}"], [f"tcp://127.0.0.1:{ports[1]}"]))
        await absent.wait_until_gone(0, gone_s=0.05)  # it ended while the model was loaded
        absent.close()

    asyncio.run(wait())


def _command(pid: int) -> bytes:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
