"""Web pages do not reach a server that is meant for this machine alone."""

from __future__ import annotations

import httpx
import pytest

from quire.config.server import HttpConfig
from quire.server.http.origins import OriginRules
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, error_of

KEY = "0123456789abcdef"
PAGE = {"host": "attacker.example:8000", "origin": "http://attacker.example:8000", "sec-fetch-site": "same-origin"}
FOREIGN = {
    "rebound name": PAGE,
    "name alone": {"host": "attacker.example"},
    "like an address": {"host": "127.0.0.1.attacker.example"},
    "like localhost": {"host": "localhost.attacker.example"},
    "user part": {"host": "localhost@attacker.example"},
    "other page": {"origin": "http://attacker.example"},
    "sandboxed page": {"origin": "null"},
    "page of another machine": {"origin": "http://192.168.1.9"},
    "image in a page": {"sec-fetch-site": "cross-site"},
}
OWN = {
    "curl": {},
    "another name": {"host": "localhost:1234"},
    "address": {"host": "192.168.1.7"},
    "ipv6": {"host": "[::1]:8000"},
    "container": {"host": "host.docker.internal:8000"},
    "page of this machine": {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"},
    "page of the server": {"host": "192.168.1.7:80", "origin": "http://192.168.1.7:80"},
    "typed address": {"sec-fetch-site": "none"},
}


def refusal(headers: dict[str, str], **settings: object) -> str | None:
    scope = {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    found = OriginRules(HttpConfig(**settings)).refusal(scope)  # type: ignore[arg-type]
    return None if found is None else found.message


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_page_is_refused(kind):
    assert refusal(FOREIGN[kind]) is not None


@pytest.mark.parametrize("kind", OWN)
def test_programs_and_pages_of_this_machine_are_answered(kind):
    assert refusal(OWN[kind]) is None


def test_names_and_pages_can_be_allowed():
    proxied = {"host": "llm.example.org"}
    assert "--allowed-hosts 'llm.example.org'" in str(refusal(proxied))
    assert refusal(proxied, allowed_hosts=("LLM.example.org",)) is None
    assert refusal(proxied, allowed_hosts=("*",)) is None
    page = {"origin": "https://a.example", "sec-fetch-site": "cross-site"}
    assert "--allowed-origins 'https://a.example'" in str(refusal(page))
    assert refusal(page, allowed_origins=("https://a.example",)) is None
    assert refusal({**page, "origin": "https://b.example"}, allowed_origins=("https://a.example",)) is not None
    assert refusal(page, allowed_origins=("*",)) is None
    assert refusal(PAGE, host="0.0.0.0") is None, "whoever listens for all has other means"


def test_the_rules_hold_for_every_path_but_those_of_load_balancers(server):
    for path in ("/v1/models", "/metrics", "/version"):
        assert httpx.get(server.url + path, headers={"host": "attacker.example"}).status_code == 403
    answer = httpx.post(server.url + CHAT, json=HELLO, headers=PAGE)
    assert answer.status_code == 403 and error_of(answer)["param"] == "host"
    assert httpx.get(server.url + "/health", headers={"host": "attacker.example"}).status_code == 200
    assert server.engine.peak == 0


def test_with_keys_the_key_decides_and_allowed_pages_may_read_the_headers_of_answers():
    page = {"origin": "https://a.example", "sec-fetch-site": "cross-site", "authorization": f"Bearer {KEY}"}
    with RunningServer(ScriptedEngine(), api_key=KEY, allowed_origins=("https://a.example",)) as server:
        answer = httpx.post(server.url + CHAT, json=HELLO, headers={**page, "host": "llm.example.org"})
        assert answer.status_code == 200
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)
