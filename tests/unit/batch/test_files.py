"""The files of a batch, and going on wherever a run was cut off."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire.batch.endpoints import Reply
from quire.batch.files import RequestFile, ResultFile
from quire.batch.runner import BatchCounts, run_batch
from quire.errors import ConfigError, QuireServerError, ValidationError


class Echo:
    """Answers with the prompt; `num_left` requests are answered, then none."""

    def __init__(self, num_left: int = 10**9) -> None:
        self.num_left = num_left
        self.asked: list[str] = []
        self.peak = self.running = 0

    async def ask(self, url: str, body: dict[str, Any], request_id: str) -> Reply:
        self.asked.append(body["prompt"])
        self.running += 1
        self.peak = max(self.peak, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if not self.num_left:
            return Reply(503, request_id, b'{"error": "gone"}')
        self.num_left -= 1
        if body["prompt"].startswith("bad"):
            return Reply(400, request_id, b'{"error": {"message": "bad"}}')
        content = {"choices": [{"text": body["prompt"]}], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}
        return Reply(200, request_id, json.dumps(content).encode())


def write_requests(path: Path, prompts: list[str]) -> str:
    lines = [
        json.dumps({"custom_id": f"id-{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}})
        for n, prompt in enumerate(prompts)
    ]
    path.write_text("\n".join([*lines, "", "not a request", ""]))
    return str(path)


def run(
    source: str, target: Path, endpoint: Echo, *, retries_failed: bool = False, is_strict: bool = False
) -> BatchCounts:
    with ResultFile(str(target), retries_failed=retries_failed) as results:
        return asyncio.run(
            run_batch(
                RequestFile(source),
                results,
                endpoint,
                max_concurrency=3,
                seed=0,
                on_progress=lambda counts: None,
                is_strict=is_strict,
            )
        )


def results_of(path: Path) -> dict[str, Any]:
    """By custom_id; asserts that each is there once."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = {str(record["custom_id"]): record for record in records}
    assert len(found) == len(records)
    return found


def test_every_line_gets_its_result(tmp_path: Path):
    source, endpoint = write_requests(tmp_path / "in", ["a", "bad b", "c", "d", "e"]), Echo()
    counts = run(source, tmp_path / "new" / "out", endpoint)
    assert (counts.num_lines, counts.num_answered, counts.num_failed, counts.num_bad) == (6, 4, 1, 1)
    assert (counts.num_prompt_tokens, counts.num_output_tokens) == (8, 12)
    found = results_of(tmp_path / "new" / "out")
    assert set(found) == {"None", *(f"id-{n}" for n in range(5))}
    assert found["id-0"]["response"]["body"]["choices"] == [{"text": "a"}]
    assert found["id-1"]["response"]["status_code"] == 400 and found["None"]["error"]["line"] == 7
    assert endpoint.peak == 3


def test_unknown_fields_of_lines_are_warned_of_once_and_refused_when_strict(tmp_path: Path, caplog):
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    lines = [{**request, "custom_id": f"id-{n}", "extra": 1, "priority": n} for n in range(3)] + [request]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    counts = run(str(tmp_path / "in"), tmp_path / "out", Echo())
    assert counts.num_answered == 4
    assert [one.getMessage() for one in caplog.records] == [
        "line 1: unknown fields have no effect: 'extra', 'priority'"
    ]
    strict = run(str(tmp_path / "in"), tmp_path / "strict", Echo(), is_strict=True)
    assert (strict.num_answered, strict.num_bad) == (1, 3)
    error = results_of(tmp_path / "strict")["id-0"]["error"]
    assert error["line"] == 1 and "unknown fields: 'extra', 'priority'" in error["message"]


def test_a_run_cut_off_at_any_byte_goes_on_to_the_same_results(tmp_path: Path):
    source, out = write_requests(tmp_path / "in", ["a", "bad b", "ü", "d"]), tmp_path / "out"
    run(source, out, Echo())
    whole, expected = out.read_bytes(), results_of(out)
    for end in range(0, len(whole), 29):
        out.write_bytes(whole[:end])
        endpoint = Echo()
        counts = run(source, out, endpoint)
        assert results_of(out) == expected
        assert counts.num_done == whole[:end].count(b"\n") and counts.num_ended == 5
        assert len(endpoint.asked) + counts.num_done + counts.num_bad == 5


def test_an_endpoint_that_takes_no_more_ends_the_run_and_the_rest_stays_open(tmp_path: Path):
    source, out = write_requests(tmp_path / "in", [f"p{n}" for n in range(20)]), tmp_path / "out"
    with pytest.raises(QuireServerError, match="503"):
        run(source, out, Echo(num_left=7))
    assert len(results_of(out)) == 7
    counts = run(source, out, Echo())
    assert counts.num_done == 7 and len(results_of(out)) == 21


def test_failed_requests_are_asked_again_when_wanted(tmp_path: Path):
    source, out = write_requests(tmp_path / "in", ["a", "bad b", "c"]), tmp_path / "out"
    run(source, out, Echo())
    endpoint = Echo()
    assert run(source, out, endpoint).num_done == 4 and endpoint.asked == []
    counts = run(source, out, endpoint, retries_failed=True)
    assert endpoint.asked == ["bad b"] and (counts.num_done, counts.num_failed, counts.num_bad) == (2, 1, 1)
    assert len(results_of(out)) == 4 and not list(tmp_path.glob("*.part"))


def test_a_custom_id_given_twice_is_refused_before_anything_is_asked(tmp_path: Path):
    write_requests(tmp_path / "in", ["a", "b"])
    with (tmp_path / "in").open("a") as file:
        file.write('{"custom_id": "id-1"}\n')
    with pytest.raises(ValidationError, match="line 5: custom_id 'id-1'"):
        RequestFile(str(tmp_path / "in"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("my notes\n", "line 1 is not the result"),
        ('{"custom_id": "a", "response": {"status_code": 200}}\n' * 2, "line 2 .* already has a result"),
        ('{"custom_id": null, "response": null, "error": null}\n', "neither custom_id"),
    ],
    ids=["something else", "twice", "nobody's"],
)
def test_an_output_file_of_something_else_is_left_alone(tmp_path: Path, content: str, message: str):
    (tmp_path / "out").write_text(content)
    with pytest.raises(ConfigError, match=message):
        ResultFile(str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == content


def test_two_runs_do_not_write_one_file(tmp_path: Path):
    with ResultFile(str(tmp_path / "out")), pytest.raises(ConfigError, match="another run"):
        ResultFile(str(tmp_path / "out"))
    with ResultFile(str(tmp_path / "out")):
        pass


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        RequestFile(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        ResultFile(str(tmp_path / "file" / "out"))
