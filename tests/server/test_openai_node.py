"""OpenAI's own Node package, unchanged, against a running server; `make test-node` installs it and runs this."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.engines import ScriptedEngine, rule
from tests.server.servers import RunningServer

NODE_DIR = Path(__file__).parent / "node"
README = Path(__file__).parents[2] / "README.md"
CHECKS = (
    "chat", "completion", "models", "streaming", "stream_helper", "logprobs", "n", "stop", "seeds", "errors",
    "timeouts", "cancelled_streams", "concurrent_streams",
)  # fmt: skip
MIN_NODE = 20


def what_is_missing() -> str | None:
    """Why the tests cannot run here; None = they can."""
    node = shutil.which("node")
    if node is None:
        return "node is not installed"
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.lstrip("v").partition(".")[0]) < MIN_NODE:
        return f"node {version.strip()} is older than {MIN_NODE}"
    if not (NODE_DIR / "node_modules/openai/package.json").is_file():
        return "the package is not installed in tests/server/node: make test-node"
    return None


@pytest.fixture(scope="module", autouse=True)
def needs_node() -> None:
    missing = what_is_missing()
    if missing is None:
        return
    assert not os.environ.get("QUIRE_TEST_NODE"), missing
    pytest.skip(missing)


@pytest.fixture(scope="module")
def results(server: RunningServer) -> Iterator[dict[str, Any]]:
    """Of each check, what it found or why it failed."""
    num_prompts = len(server.engine.prompts)
    with RunningServer(ScriptedEngine(holds=True)) as silent:
        found = run_node(["openai_client.mjs", server.url, silent.url])
        assert not silent.engine.live and not silent.state.running
    records = [json.loads(line) for line in found.splitlines()]
    records[0]["prompt"] = server.engine.prompts[num_prompts]
    yield {record.pop("name"): record for record in records}
    assert not server.engine.live and not server.state.running


def run_node(arguments: list[str]) -> str:
    done = subprocess.run(
        ["node", *arguments], cwd=NODE_DIR, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_check_has_run(results):
    assert tuple(results) == CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_the_client_works_unchanged(results, name: str):
    assert "failure" not in results[name], results[name]["failure"]


def test_a_chat_has_the_text_that_the_engine_made(server, results):
    ids = [rule(results["chat"]["prompt"], 0, position) for position in range(5)]
    assert results["chat"]["found"] == server.engine.tokenizer.decode(ids)


def test_64_streams_at_once_each_get_their_own_answer(results):
    answers = results["concurrent_streams"]["found"]
    assert len(answers) == 64
    for prompt, ids in answers:
        assert ids == [rule(prompt, 0, position) for position in range(12)]


def test_the_example_of_the_readme_runs(server):
    (example,) = re.findall(r"^```js\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert "http://127.0.0.1:8000" in example
    code = example.replace("stream: true", "stream: true, max_tokens: 5").replace("http://127.0.0.1:8000", server.url)
    shown = run_node(["--input-type=module", "--eval", code])
    ids = [rule(server.engine.prompts[-1], 0, position) for position in range(5)]
    assert shown.strip() == server.engine.tokenizer.decode(ids).strip()
