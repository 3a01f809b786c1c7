"""Bodies of requests: counted before they are decoded, bounded in size and in number, read in one way only."""

from __future__ import annotations

import gzip
import json
import random
import threading
from typing import Any

import httpx
import pytest

from quire.errors import ValidationError
from quire.server.api.openai.protocol.completion import COMPLETION_FIELDS
from quire.server.chat.protocol import json_scan
from quire.server.chat.protocol.json_scan import JsonParts, count_parts, num_members
from quire.server.chat.protocol.reading import read_object, read_request
from quire.server.chat.protocol.warnings import MAX_WARNINGS
from quire.server.http.body_budget import LONG_BYTES_PER_S, SMALL_BYTES, STALLED_S, UNPACED_BYTES, BodyBudget, BodyLease
from quire.server.http.errors import ApiError
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, error_of, post
from tests.server.test_rate_limits import Clock

JSON_TYPE = {"content-type": "application/json"}


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 4 or kind < 0.4:
        return rng.choice([1, "a", 'x:,{["\\', None, '"', '\\"\\\\', '{"a":1,"a":2}', "", "ü\\"])
    count = rng.randrange(5)
    if kind < 0.7:
        return [random_value(rng, depth + 1) for _ in range(count)]
    return {rng.choice('abc:,"\\{[]}') * 3 + str(i): random_value(rng, depth + 1) for i in range(count)}


def parts_of(value: Any) -> JsonParts:
    if not isinstance(value, (dict, list)):
        return JsonParts()
    inner = [parts_of(one) for one in (value.values() if isinstance(value, dict) else value)]
    return JsonParts(
        sum(one.num_members for one in inner) + (len(value) if isinstance(value, dict) else 0),
        sum(one.num_containers for one in inner) + 1,
        sum(one.num_commas for one in inner) + max(0, len(value) - 1),
    )


def test_the_parts_of_a_text_are_counted_as_a_decoder_would_wherever_blocks_end(monkeypatch):
    rng = random.Random(5)
    for _ in range(400):
        monkeypatch.setattr(json_scan, "BLOCK_BYTES", rng.choice([2, 3, 7, 64, 1 << 18]))
        value = [random_value(rng)]
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode()
        assert count_parts(text) == parts_of(value), text
        assert num_members(value) == parts_of(value).num_members


MANY = 200_000
COUNTLESS = {
    "unknown fields": b'{"prompt":"a",' + b",".join(b'"k%d":0' % i for i in range(MANY)) + b"}",
    "logit_bias": b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":0' % i for i in range(MANY)) + b"}}",
    "token ids": b'{"prompt":[' + b"1," * (1 << 20) + b"1,1]}",
    "stop texts": b'{"stop":[' + b'"",' * (1 << 20) + b'"",""]}',
}


@pytest.mark.parametrize("kind", COUNTLESS)
def test_a_body_of_countless_members_or_entries_is_refused_before_it_is_decoded(kind, monkeypatch):
    monkeypatch.setattr("msgspec.json.decode", lambda text: pytest.fail("decoded"))
    with pytest.raises(ValidationError, match=r"more than \d+ (members|entries)"):
        read_object(COUNTLESS[kind], 64, 100_000)


def test_a_scan_of_millions_of_members_ends_at_the_bound(monkeypatch):
    looked_at: list[int] = []
    marks = json_scan._marks_outside_of_texts
    monkeypatch.setattr(
        json_scan, "_marks_outside_of_texts", lambda block, is_in: looked_at.append(len(block)) or marks(block, is_in)
    )
    body = b"{" + b'"aaaa":0,' * 2_500_000 + b'"a":0}'
    with pytest.raises(ValidationError, match="more than 100000 members"):
        read_object(body, 64, 100_000)
    assert sum(looked_at) < len(body) / 10


def test_unknown_names_are_looked_at_until_there_are_enough_warnings():
    class Names(dict[str, Any]):
        seen = 0

        def __getitem__(self, name: str) -> Any:
            Names.seen += 1
            return super().__getitem__(name)

    values = Names({f"k{i}": 0 for i in range(5000)}, prompt="a")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("quire.server.chat.protocol.reading.read_object", lambda *_: values)
        _, warnings = read_request(b"", COMPLETION_FIELDS, max_depth=64, max_containers=10_000, is_strict=False)
    assert len(warnings.texts) == MAX_WARNINGS == Names.seen


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_lists_that_are_too_long_are_refused_before_they_are_converted(server, name, monkeypatch):
    monkeypatch.setattr("msgspec.convert", lambda *_: pytest.fail("converted"))
    value = {str(i): 0 for i in range(5000)} if name == "logit_bias" else ["a" if name == "stop" else 1] * 5000
    answer = post(server, "/v1/completions", {"prompt": "a", name: value})
    assert answer.status_code == 400 and error_of(answer)["param"] == name
    assert "5000 entries" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("body", "key", "param"),
    [
        ('{"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "max_tokens": 7}', "max_tokens", True),
        ('{"messages": [{"role": "system", "content": "a", "role": "user"}]}', "role", False),
        ('{"messages": [{"role": "user", "content": "a:b,c"}], "x": {"a": [{}, {"b": 1, "b": 1}]}}', "b", False),
        ('{"messages": [{"role": "user", "content": "a"}], "t\\u006fols": [], "tools": []}', "tools", True),
        ('{"x": ' + "9" * 300 + ".0" + ', "n": 1, "n": 1}', "n", True),
    ],
    ids=["field", "message", "deep", "escaped", "long number"],
)
def test_a_key_that_is_given_twice_is_refused_by_name(server, body, key, param):
    answer = httpx.post(server.url + CHAT, content=body.encode(), headers=JSON_TYPE)
    assert answer.status_code == 400, answer.text
    assert f"'{key}'" in error_of(answer)["message"]
    assert error_of(answer)["param"] == (key if param else None)


def test_keys_in_texts_and_in_several_objects_are_not_taken_for_repeated_ones(server):
    texts = ['{"a":1,"a":2}', '"a":"a":', "\\", '\\"', "::::", '{"role":"user"}']
    messages = [{"role": "user", "content": text} for text in texts]
    assert post(server, CHAT, {"messages": messages, "max_tokens": 1}).status_code == 200


def test_a_byte_order_mark_is_left_out(server):
    body = b"\xef\xbb\xbf" + json.dumps({**HELLO, "max_tokens": 1}).encode()
    assert httpx.post(server.url + CHAT, content=body, headers=JSON_TYPE).status_code == 200


def test_a_compressed_body_is_refused_by_its_header(server):
    body = gzip.compress(json.dumps(HELLO).encode())
    answer = httpx.post(server.url + CHAT, content=body, headers={**JSON_TYPE, "content-encoding": "gzip"})
    assert answer.status_code == 415 and "content-encoding" in error_of(answer)["message"]
    plain = httpx.post(server.url + CHAT, json=HELLO, headers={"content-encoding": "identity"})
    assert plain.status_code == 200


def test_a_body_may_be_as_long_as_the_model_can_use(server):
    headers = {**JSON_TYPE, "content-length": str(33 << 20)}
    answer = httpx.post(server.url + CHAT, content=b" " * (33 << 20), headers=headers)
    assert answer.status_code == 413 and f"{4 << 20} bytes (max_body_bytes)" in error_of(answer)["message"]
    assert post(server, CHAT, {**HELLO, "metadata": {"a": "x" * (3 << 20)}}).status_code == 200


def grown(budget: BodyBudget, num_bytes: int, tenant: str = "red") -> BodyLease:
    lease = budget.open(tenant)
    lease.take(num_bytes)
    return lease


def test_bodies_share_a_budget_of_which_the_last_part_is_for_small_ones():
    budget = BodyBudget(1 << 20, lambda: False, Clock())
    leases = [grown(budget, 1 << 17) for _ in range(7)]
    with pytest.raises(ApiError) as caught:
        grown(budget, SMALL_BYTES + 1)
    assert (caught.value.kind.status, caught.value.retry_after_s) == (503, 1) and "max_bodies_bytes" in str(
        caught.value
    )
    small = [grown(budget, SMALL_BYTES) for _ in range(2)]
    with pytest.raises(ApiError):
        grown(budget, 1)
    for lease in [*leases, *small, *small]:
        lease.close()
    assert budget.num_bytes == 0 and grown(budget, 7 << 17).num_bytes == 7 << 17


def test_one_of_several_tenants_has_half_of_the_budget():
    budget = BodyBudget(1 << 20, lambda: True, Clock())
    for _ in range(4):
        grown(budget, 1 << 17)
    with pytest.raises(ApiError):
        grown(budget, 1)
    grown(budget, 1 << 17, "blue")


def test_a_body_of_which_nothing_comes_gives_its_bytes_to_one_that_comes():
    clock = Clock()
    budget = BodyBudget(1 << 20, lambda: True, clock)
    blue = grown(budget, 1 << 17, "blue")
    slow = [grown(budget, 1 << 17) for _ in range(4)]
    clock.seconds += STALLED_S - 1
    slow[0].take(0)
    clock.seconds += 1
    grown(budget, 1 << 17)
    assert [lease.is_given_up for lease in slow] == [False, True, False, False] and not blue.is_given_up
    whole = slow[2]
    whole.note_whole()
    grown(budget, 1 << 17)
    assert slow[3].is_given_up and not whole.is_given_up, "what waits to be worked on is kept"
    with pytest.raises(ApiError):
        grown(budget, 1 << 18)


def test_bodies_beyond_the_budget_are_answered_with_503_and_when_to_come_back():
    goes_on = threading.Event()

    def held():
        yield b" " * (400 << 10)
        goes_on.wait(60)
        yield json.dumps(HELLO).encode()

    with RunningServer(ScriptedEngine(), max_bodies_bytes=512 << 10) as server:
        statuses: list[int] = []
        thread = threading.Thread(
            target=lambda: statuses.append(httpx.post(server.url + CHAT, content=held(), headers=JSON_TYPE).status_code)
        )
        thread.start()
        server.wait_until(lambda: server.state.bodies.budget.num_bytes >= 400 << 10)
        large = {**HELLO, "metadata": {"a": "x" * (200 << 10)}}
        refused = post(server, CHAT, large)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert post(server, CHAT, HELLO).status_code == 200, "there is room for a small one"
        goes_on.set()
        thread.join()
        assert statuses == [200]
        assert post(server, CHAT, large).status_code == 200
        assert server.state.bodies.budget.num_bytes == 0


def test_long_bodies_of_one_of_several_tenants_are_received_at_one_pace():
    clock = Clock()
    budget = BodyBudget(1 << 30, lambda: True, clock)
    short = grown(budget, UNPACED_BYTES)
    assert budget.pause_s(short, UNPACED_BYTES) == 0
    one, other, blue = (grown(budget, LONG_BYTES_PER_S // 4, tenant) for tenant in ("red", "red", "blue"))
    assert budget.pause_s(one, one.num_bytes) == 0.25
    assert budget.pause_s(other, other.num_bytes) == 0.5, "after the first one's"
    assert budget.pause_s(blue, blue.num_bytes) == 0.25
    clock.seconds += 9
    assert budget.pause_s(one, LONG_BYTES_PER_S // 8) == 0.125, "time in which nothing came is not made up for"


def test_one_tenant_alone_has_no_pace():
    budget = BodyBudget(1 << 30, lambda: False, Clock())
    assert budget.pause_s(grown(budget, LONG_BYTES_PER_S), LONG_BYTES_PER_S) == 0
