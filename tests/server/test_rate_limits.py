"""What a tenant may use: buckets to the microsecond, key files to the field. No server runs here."""

from __future__ import annotations

import os
import random

import pytest

from quire.config.server import LimitsConfig
from quire.config.tenants import TenantLimits
from quire.errors import ConfigError, QuireClientError
from quire.server.http.admission import Admission
from quire.server.http.errors import ApiError
from quire.server.http.key_watch import KeyWatch
from quire.server.http.keys import ApiKeys, check_limits, read_api_keys
from quire.server.http.rate_limits import Bucket, duration
from quire.server.http.tenants import Tenant, Tenants
from tests.server.servers import server_config


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, seconds: float = 1000.0) -> None:
        self.seconds = seconds

    def __call__(self) -> float:
        return self.seconds


def tenant(clock: Clock, **limits: object) -> Tenant:
    return Tenant("red", TenantLimits(**limits), clock)  # type: ignore[arg-type]


def refusal(check: object, *args: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check(*args)  # type: ignore[operator]
    return caught.value


def test_a_bucket_gives_what_it_holds_and_refills_evenly():
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.remaining == 60 and bucket.wait_s(60) == 0
    bucket.take(60)
    assert bucket.remaining == 0 and bucket.wait_s(1) == 1.0 and bucket.full_after_s == 60.0
    clock.seconds += 2.5
    assert bucket.remaining == 2 and bucket.wait_s(3) == 0.5
    clock.seconds += 3600
    assert bucket.remaining == 60, "it holds no more than its size"


@pytest.mark.parametrize("per_minute", [1, 7, 60, 999, 100_000])
def test_who_waits_as_long_as_told_is_let_in_and_a_microsecond_earlier_is_not(per_minute):
    rng = random.Random(per_minute)
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    for _ in range(200):
        amount = rng.randint(1, per_minute)
        wait = bucket.wait_s(amount)
        if wait:
            clock.seconds += wait - 1e-6
            assert bucket.wait_s(amount) > 0
            clock.seconds += 1e-6
        assert bucket.wait_s(amount) == 0
        bucket.take(amount + rng.randint(0, per_minute))  # new tokens may make a debt
        clock.seconds += rng.random()


def test_times_are_written_as_openai_writes_them():
    written = [duration(seconds) for seconds in (0, 0.0204, 1, 1.5, 59.9999, 360, 3661.25)]
    assert written == ["0ms", "21ms", "1s", "1.5s", "1m0s", "6m0s", "1h1m1.25s"]


def test_requests_a_minute_are_refused_with_the_exact_wait():
    clock = Clock()
    red = tenant(clock, requests_per_minute=6)
    for _ in range(6):
        red.check(5)
        red.enter(1, 5)
    clock.seconds += 2.5
    error = refusal(red.check, 5)
    assert (error.kind.status, error.kind.type, error.kind.code) == (429, "requests", "rate_limit_exceeded")
    assert error.retry_after_s == 7.5 and error.reason == "requests_per_minute"
    headers = error.response().headers
    assert headers["retry-after"] == "8" and headers["retry-after-ms"] == "7500"
    assert dict(red.headers()) == {
        b"x-ratelimit-limit-requests": b"6", b"x-ratelimit-remaining-requests": b"0",
        b"x-ratelimit-reset-requests": b"57.5s",
    }  # fmt: skip
    clock.seconds += 7.5
    red.check(5)


def test_a_refused_request_is_not_charged():
    clock = Clock()
    red = tenant(clock, requests_per_minute=1, tokens_per_minute=100)
    red.enter(1, 10)
    before = red.headers()
    for _ in range(5):
        refusal(red.check, 10)
    assert red.headers() == before


def test_a_prompt_is_charged_at_once_and_new_tokens_as_they_come_even_into_debt():
    clock = Clock()
    red = tenant(clock, tokens_per_minute=600)
    red.check(500)
    red.enter(1, 500)
    red.charge(400)
    error = refusal(red.check, 50)
    assert error.kind.type == "tokens" and error.retry_after_s == 35.0, "300 of debt and 50, at 10 a second"
    assert dict(red.headers())[b"x-ratelimit-remaining-tokens"] == b"0"
    assert dict(red.headers())[b"x-ratelimit-reset-tokens"] == b"1m30s"
    too_long = refusal(red.check, 601)
    assert too_long.kind.status == 400 and "601" in too_long.message and "600" in too_long.message


def test_the_longer_of_two_waits_is_told():
    clock = Clock()
    red = tenant(clock, requests_per_minute=60, tokens_per_minute=60)
    for _ in range(60):
        red.enter(1, 1)
    assert refusal(red.check, 30).retry_after_s == 30.0


def test_so_many_requests_may_be_under_way():
    red = tenant(Clock(), max_concurrent=2)
    admission = Admission(LimitsConfig(), 8)
    tickets = [admission.enter(3, 10, red) for _ in range(2)]
    assert refusal(admission.enter, 1, 1, red).reason == "max_concurrent" and red.num_answers == 6
    admission.leave(tickets[0])
    admission.leave(tickets[0])
    admission.enter(1, 1, red)
    assert red.num_requests == 2 and red.num_answers == 4


def test_a_tenant_takes_no_more_than_its_share_of_the_queue():
    red, blue = tenant(Clock(), queue_share=0.5), Tenant("blue", TenantLimits())
    admission = Admission(LimitsConfig(max_num_queued_reqs=4), 2)
    admission.enter(2, 10, blue)
    for _ in range(2):
        admission.enter(1, 10, red)
    error = refusal(admission.enter, 1, 10, red)
    assert error.reason == "queue_share" and "blue" not in error.message
    for _ in range(2):
        admission.enter(1, 10, blue)
    assert refusal(admission.enter, 1, 10, blue).reason == "max_num_queued_reqs"


def test_what_computes_is_no_part_of_a_tenants_queue():
    red = tenant(Clock(), queue_share=0.5)
    admission = Admission(LimitsConfig(max_num_queued_reqs=2), 8)
    for _ in range(8):
        admission.enter(1, 10, red)
    admission.enter(1, 10, red)
    assert refusal(admission.enter, 1, 10, red).reason == "queue_share"


def test_a_request_that_finds_nothing_under_way_is_taken():
    admission = Admission(LimitsConfig(max_num_queued_reqs=0, max_num_queued_tokens=0), 2)
    ticket = admission.enter(5, 100)
    assert refusal(admission.enter, 1, 1).reason == "max_num_queued_reqs"
    admission.leave(ticket)
    admission.enter(5, 100)


def test_max_tokens_is_capped_and_both_numbers_are_named():
    red = tenant(Clock(), max_tokens=100)
    error = refusal(red.max_tokens, 101, 101)
    assert error.kind.status == 400 and error.param == "max_tokens"
    assert "101" in error.message and "100" in error.message
    assert [red.max_tokens(100, 100), red.max_tokens(None, None), red.max_tokens(None, 16)] == [100, 100, 16]
    assert tenant(Clock()).max_tokens(None, None) is None


def test_a_priority_is_the_requests_the_tenants_or_refused():
    red = tenant(Clock(), priority=3, min_priority=1, max_priority=5)
    assert [red.priority(None), red.priority(1), red.priority(5)] == [3, 1, 5]
    for asked in (0, 6):
        error = refusal(red.priority, asked)
        assert error.param == "priority" and "1 to 5" in error.message
    assert tenant(Clock(), min_priority=-2).priority(10**6) == 10**6


TENANTS = """\
# who may do what
tenants:
  red:
    keys: [red-key-1234, red-key-5678]
    requests_per_minute: 60
    tokens_per_minute: 100000
    max_concurrent: 8
    max_tokens: 512
    queue_share: 0.25
    min_priority: 0
    max_priority: 10
    weight: 1
  blue: {keys: ["12345678"], operator: true}
  default: {max_concurrent: 4}
"""


def read(tmp_path, content: str) -> ApiKeys:
    file = tmp_path / "keys.yaml"
    file.write_text(content)
    return read_api_keys(server_config(api_key_file=str(file)).api)


def test_a_file_of_tenants_gives_each_keys_and_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("QUIRE_API_KEY", "environment-key")
    keys = read(tmp_path, TENANTS)
    owners = [keys.tenant_of(f"Bearer {key}".encode()) for key in ("red-key-1234", "red-key-5678", "12345678")]
    assert owners == ["red", "red", "blue"] and keys.tenant_of(b"Bearer environment-key") == "default"
    assert keys.limits["red"] == TenantLimits(
        requests_per_minute=60, tokens_per_minute=100000, max_concurrent=8, max_tokens=512, queue_share=0.25,
        min_priority=0, max_priority=10, weight=1,
    )  # fmt: skip
    assert keys.limits["default"].max_concurrent == 4 and keys.limits["blue"].operator is True


def test_a_file_of_lines_is_read_as_ever(tmp_path):
    keys = read(tmp_path, "# ours\nplain-key-1\nred=red-key-1234\ntenants=tenants-key\n")
    assert keys.tenant_of(b"Bearer tenants-key") == "tenants" and keys.tenant_of(b"Bearer plain-key-1") == "default"
    assert keys.limits["red"] == TenantLimits()


@pytest.mark.parametrize(
    "content",
    ["red=red-key-1234\nblue=red-key-1234\n", "red-key-1234\n\n# again\nred=red-key-1234\n", "red=red-key-1234\n" * 2],
)
def test_a_key_twice_in_a_file_of_lines_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match=r"line [24]: duplicate key") as caught:
        read(tmp_path, content)
    assert "red-key" not in str(caught.value) and caught.value.field == "api_key_file"


@pytest.mark.parametrize("content", ["red=red-key-1234\n", "tenants:\n  red: {keys: [red-key-1234]}\n"])
def test_a_key_of_the_settings_cannot_be_another_tenants_in_the_file(tmp_path, monkeypatch, content):
    (tmp_path / "keys").write_text(content)
    config = server_config(api_key_file=str(tmp_path / "keys"), api_key=["red-key-1234"]).api
    with pytest.raises(ConfigError, match="a key of tenant red is also in api_key or QUIRE_API_KEY") as caught:
        read_api_keys(config)
    assert "red-key" not in str(caught.value)
    monkeypatch.setenv("QUIRE_API_KEY", "red-key-1234")
    with pytest.raises(ConfigError, match="for tenant default"):
        read(tmp_path, content)
    assert read(tmp_path, "red-key-1234\n").tenant_of(b"Bearer red-key-1234") == "default", "it says the same"


BAD_FILES = {
    "unknown limit": ("red: {keys: [red-key-1234], max_token: 5}", "max_token", "did you mean"),
    "wrong type": ("red: {keys: [red-key-1234], max_tokens: many}", "max_tokens", "an integer"),
    "out of range": ("red: {keys: [red-key-1234], queue_share: 1.5}", "queue_share", "0 to 1"),
    "zero": ("red: {keys: [red-key-1234], requests_per_minute: 0}", "requests_per_minute", "1 to"),
    "no keys": ("red: {max_tokens: 5}", "keys", "keys:"),
    "a number as a key": ("red: {keys: [12345678]}", "keys", "quotes"),
    "a short key": ("red: {keys: [short]}", "api_key_file", "openssl"),
    "no limits at all": ("red:", "keys", "keys:"),
    "a bad name": ("'a b': {keys: [red-key-1234]}", "tenants", "letters"),
    "a key twice": ("red: {keys: [red-key-1234]}\n  blue: {keys: [red-key-1234]}", "keys", "keep one"),
    "a limit twice": ("red: {keys: [red-key-1234], max_tokens: 5, max_tokens: 6}", "api_key_file", "keep one"),
    "a tenant twice": ("red: {keys: [red-key-1234]}\n  red: {keys: [red-key-5678]}", "api_key_file", "keep one"),
    "a weight of nothing": ("red: {keys: [red-key-1234], weight: 0}", "weight", "0.001 to"),
    "an unknown policy": ("red: {keys: [red-key-1234], policy: fifo}", "policy", "fcfs"),
    "a priority outside its range": (
        "red: {keys: [red-key-1234], priority: 7, max_priority: 5}", "priority", "widen",
    ),
    "an alias": ("red: {keys: &k [red-key-1234]}\n  blue: {keys: *k}", "api_key_file", "repeat the value instead"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "field", "hint"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_of_tenants_is_refused_by_field(tmp_path, content, field, hint):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"tenants:\n  {content}\n")
    assert caught.value.field == field and hint in str(caught.value)
    assert "red-key" not in str(caught.value), "a key is no text for a log"


@pytest.mark.parametrize("content", ["tenants: 5\n", "tenants:\n", "tenants: {}\nother: 1\n"])
def test_a_file_of_tenants_has_tenants_alone(tmp_path, content):
    with pytest.raises(QuireClientError):
        read(tmp_path, content)


def test_limits_that_other_settings_make_meaningless_are_refused():
    def check(scheduling: str, *, has_queue_limits: bool, **limits: object) -> None:
        keys = ApiKeys({"red-key-1234": "red"}, {"red": TenantLimits(**limits)})  # type: ignore[arg-type]
        check_limits(keys, policy=scheduling, has_queue_limits=has_queue_limits)

    check("priority", has_queue_limits=True, priority=3, queue_share=0.5)
    with pytest.raises(ConfigError, match="fcfs"):
        check("fcfs", has_queue_limits=True, priority=3)
    check("fair", has_queue_limits=True, weight=2.5, policy="priority", priority=3)
    check("fcfs", has_queue_limits=True, weight=1, policy="fcfs")
    for scheduling in ("fcfs", "priority", "shortest"):
        for limit in ({"weight": 2}, {"policy": "shortest"}):
            with pytest.raises(
                ConfigError, match=f"tenant red: {next(iter(limit))}=.* scheduling_policy='{scheduling}'"
            ):
                check(scheduling, has_queue_limits=True, **limit)
    with pytest.raises(ConfigError, match="priority=3 has no effect") as caught:
        check("fair", has_queue_limits=True, priority=3)
    assert "policy: priority" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="queue_share"):
        check("fcfs", has_queue_limits=False, queue_share=0.5)


def test_a_changed_file_is_read_and_a_broken_one_changes_nothing(tmp_path, caplog):
    file = tmp_path / "keys"
    config = server_config(api_key_file=str(file)).api

    def write(content: str) -> None:
        file.write_text(content)
        os.utime(file, ns=(len(content) * 10**9, len(content) * 10**9))

    write("tenants:\n  red: {keys: [red-key-1234], requests_per_minute: 60}\n")
    tenants = Tenants(read_api_keys(config), Clock())
    watch = KeyWatch(str(file), lambda: read_api_keys(config), tenants)
    red = tenants.of(b"Bearer red-key-1234")
    assert red is not None and not watch.is_due()
    for _ in range(50):
        red.enter(1, 1)
    write("tenants:\n  red: {keys: [red-key-5678], requests_per_minute: 20}\n  blue: {keys: [blue-key-1234]}\n")
    assert not watch.is_due(), "it may be half written"
    assert watch.is_due()
    watch.use(watch.read())
    assert tenants.of(b"Bearer red-key-1234") is None and tenants.of(b"Bearer red-key-5678") is red
    assert dict(red.headers())[b"x-ratelimit-remaining-requests"] == b"10", "what was used stays used"
    write("tenants:\n  red: {keys: [red-key-9999], max_tokens: none at all}\n")
    assert not watch.is_due() and watch.is_due()
    watch.use(watch.read())
    assert not watch.is_due(), "an error is logged once"
    assert tenants.of(b"Bearer red-key-5678") is red and tenants.of(b"Bearer blue-key-1234") is not None
    file.unlink()
    assert not watch.is_due() and watch.is_due() and watch.read() is None
    assert tenants.of(b"Bearer red-key-5678") is red
