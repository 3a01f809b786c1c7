"""The server's fuzzing in small: hundreds of hostile requests beside eight streams."""

from __future__ import annotations

import asyncio
import json
import time

from tests.robustness.fuzz_server import Cases, Run
from tests.robustness.server_fuzz import client
from tests.robustness.server_fuzz.canaries import joined
from tests.robustness.server_fuzz.cases import Case
from tests.robustness.server_fuzz.client import Answer, Outcome, Player, Progress
from tests.robustness.server_fuzz.judge import complaints
from tests.robustness.server_fuzz.processes import Levels, Served

NUM_REQUESTS = 300


def test_hostile_requests_hurt_nobody(tmp_path):
    with Served(tmp_path) as served:
        run = Run(served, seed=20)
        asyncio.run(run.run(range(NUM_REQUESTS), num_players=8))
    assert not run.failures
    assert run.canaries.num_compared >= 8 and len(run.counts) >= 10
    assert run.statuses[200] > 20 and run.statuses[400] > 100


def test_a_case_follows_from_its_seed_and_number():
    cases, again, others = Cases(5), Cases(5), Cases(6)
    assert [cases.case(i) for i in range(60)] == [again.case(i) for i in reversed(range(60))][::-1]
    assert cases.case(1) != others.case(1)


def error(status: int, **fields: object) -> Answer:
    content = {"message": "no", "type": "BadRequestError", "param": None, "code": status, **fields}
    return Answer(status, {"content-type": "application/json"}, json.dumps({"error": content}).encode())


def test_the_judge_hears_what_is_wrong():
    case = Case("x", (b"",))
    good = [error(400), Answer(200, {"content-type": "text/event-stream"}, b"data: {}\n\ndata: [DONE]\n\n")]
    assert not complaints(case, Outcome(good))
    served = error(404, type="NotFoundError", code="not_supported")
    too_long = error(400, type="invalid_request_error", code="context_length_exceeded")
    assert not complaints(case, Outcome([served, too_long]))
    message = {"type": "error", "error": {"type": "not_found_error", "message": "no"}, "request_id": "x"}
    assert not complaints(case, Outcome([Answer(404, {}, json.dumps(message).encode())]))
    assert complaints(case, Outcome([Answer(400, {}, json.dumps(message).encode())]))
    bad = [
        error(500), error(400, type="Other"), error(400, code=422), error(400, message='File "/usr/x.py"'),
        error(400, message="ValueError"), Answer(400, {}, b"Bad Request"), Answer(302, {}, b""),
        Answer(200, {"content-type": "text/event-stream"}, b"data: {}\n\n"),
        Answer(200, {"content-type": "text/event-stream"}, b'data: {"error": {}}\n\ndata: [DONE]\n\n'),
    ]  # fmt: skip
    for answer in bad:
        assert complaints(case, Outcome([answer])), answer
    assert complaints(case, Outcome()) and complaints(case, Outcome(gave_up=True))


def test_a_stream_is_the_same_however_it_was_cut_and_another_when_a_character_is():
    def stream(*texts: str) -> bytes:
        parts = [{"choices": [{"index": 0, "text": text, "logprobs": {"tokens": [text]}}]} for text in texts]
        return b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in parts) + b"data: [DONE]\n\n"

    assert b'"text": "abc"' in joined(stream("a", "bc"))
    assert joined(stream("a", "b")) != joined(stream("a", "c"))


def test_a_deadline_counts_from_the_last_progress(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress, seen = Progress(10.0), []
    for now[0], count in ((9.0, 0), (15.0, 0), (18.0, 1), (27.0, 1), (29.0, 1)):
        seen.append(progress.has_stopped(count))
    assert seen == [False, False, False, False, True]


async def no_answer() -> Outcome:
    is_over = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    player = Player(server.sockets[0].getsockname()[1], Progress(0.05), lambda: 0)
    outcome = await player.play(Case("x", (b"GET / HTTP/1.1\r\n\r\n",), methods=("GET",)))
    is_over.set()
    server.close()
    return outcome


def test_a_case_without_an_answer_is_given_up_when_no_other_is_answered(monkeypatch):
    monkeypatch.setattr(client, "LOOK_S", 0.01)
    assert asyncio.run(no_answer()).gave_up


def test_growing_memory_and_files_are_not_level():
    levels = Levels([(100.0, 300.0, 30, 12)] * 160)
    assert not levels.complaints()
    growing = [(100.0 + i, 300.0 + 3 * i, 30 + 5 * i, 12) for i in range(160)]
    assert len(Levels(growing).complaints()) == 3 and not Levels(growing[:100]).complaints()
