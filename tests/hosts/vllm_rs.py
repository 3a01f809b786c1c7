"""vLLM's Rust server in front of this engine, against `quire serve`: the same texts, and what happens at kills.

    python -m tests.hosts.vllm_rs

`make test-vllm-rs`. Fetches vLLM's wheel with pip (336 MB) the first time, and keeps only `vllm-rs` of it. The last
lines are what its own benchmark measures, and how many checks passed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.hosts.programs import BUILD, Program, answers, core_of, free_port, metric, stream_text
from tests.robustness.server_process import ServerProcess, wait_until

VERSION = "0.33.0"
LEAF = Path("quire") / "assets" / "leaf"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = {"model": "leaf", "prompt": "Once upon a time"}
TALK = {"model": "leaf", "messages": [{"role": "user", "content": "Tell me a story about a cat."}]}
LONG = {**STORY, "max_tokens": 600, "seed": 5, "ignore_eos": True}
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {**STORY, "max_tokens": 30, "temperature": 0}),
    (COMPLETIONS, {**STORY, "max_tokens": 30, "seed": 7}),
    (COMPLETIONS, {**STORY, "max_tokens": 8, "temperature": 0, "logprobs": 3}),
    (COMPLETIONS, {**STORY, "max_tokens": 3, "temperature": 0, "logprobs": 2, "echo": True}),
    (COMPLETIONS, {**STORY, "max_tokens": 40, "seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.7,
                   "repetition_penalty": 1.2, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    (COMPLETIONS, {**STORY, "max_tokens": 40, "temperature": 0, "stop": ["lived"]}),
    (COMPLETIONS, {**STORY, "max_tokens": 40, "temperature": 0, "stop_token_ids": [524]}),
    (COMPLETIONS, {**STORY, "max_tokens": 20, "temperature": 0, "logit_bias": {"300": 50}}),
    (COMPLETIONS, {**STORY, "max_tokens": 20, "temperature": 0, "allowed_token_ids": [300, 301, 302]}),
    (COMPLETIONS, {**STORY, "max_tokens": 300, "min_tokens": 120, "temperature": 0}),
    (COMPLETIONS, {**STORY, "max_tokens": 200, "temperature": 0, "ignore_eos": True}),
    (COMPLETIONS, {**STORY, "prompt": [5, 6, 7, 8], "max_tokens": 10, "temperature": 0}),
    (CHAT, {**TALK, "max_tokens": 30, "temperature": 0}),
    (CHAT, {**TALK, "max_tokens": 30, "seed": 11, "logprobs": True, "top_logprobs": 3}),
    (CHAT, {**TALK, "max_tokens": 60, "seed": 11, "response_format": {"type": "json_object"}}),
    (CHAT, {**TALK, "max_tokens": 60, "seed": 11,
            "response_format": {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}}),
    (CHAT, {**TALK, "max_tokens": 60, "seed": 11, "structured_outputs": {"choice": ["red", "blue"]}}),
    (CHAT, {**TALK, "max_tokens": 60, "seed": 11, "structured_outputs": {"regex": "[a-c]{4,8}"}}),
    (CHAT, {"model": "leaf", "messages": [{"role": "user", "content": "What is the weather in Rome?"}],
            "max_tokens": 60, "temperature": 0, "tools": TOOLS}),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"priority": 5}, "priority"),
    ({"vllm_xargs": {"a": 1}}, "extra_args"),
    ({"structured_outputs": {"json": {"type": "sharp"}}}, "json"),
]


def fetched() -> Path:
    """The program, from vLLM's wheel."""
    program = BUILD / f"vllm-rs-{VERSION}" / "vllm-rs"
    if not program.exists():
        with tempfile.TemporaryDirectory() as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*pip, "--dest", folder, f"vllm=={VERSION}"], check=True)
            (wheel,) = Path(folder).glob("*.whl")
            program.parent.mkdir(parents=True, exist_ok=True)
            with zipfile.ZipFile(wheel) as archive:
                unpacked = program.with_suffix(".part")
                unpacked.write_bytes(archive.read("vllm/vllm-rs"))
        unpacked.chmod(0o755)
        unpacked.rename(program)
    return program.absolute()


@contextmanager
def front(program: Path) -> Iterator[tuple[str, Program]]:
    """vllm-rs with this engine, as a user starts it; its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(program), "serve", str(LEAF.absolute()), "--python", str(Path(sys.executable).with_name("quire")),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "leaf", "--tool-call-parser", "hermes",
        "--enable-prompt-tokens-details", "--", "--num-threads", "1",
    ]  # fmt: skip
    with Program(command, lambda: answers(url), {"VLLM_SERVER_DEV_MODE": "1"}) as started:
        yield url, started


def asked(url: str, path: str, body: dict[str, Any]) -> Any:
    """What matters of an answer, alike for both servers; (status, message) where it was refused."""
    response = httpx.post(f"{url}{path}", json=body, timeout=120)
    answer = response.json()
    if response.status_code != 200:
        return response.status_code, answer.get("error", answer)["message"]
    choice, usage = answer["choices"][0], answer["usage"]
    message = choice.get("message") or {}
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or []]
    return {
        "text": choice.get("text", message.get("content")), "calls": calls, "reason": choice["finish_reason"],
        "stop": choice.get("stop_reason"), "logprobs": sampled(choice.get("logprobs")),
        # Its template engine writes tools in another way, with the same meaning.
        "usage": (None if "tools" in body else usage["prompt_tokens"], usage["completion_tokens"]),
    }  # fmt: skip


def sampled(logprobs: Any) -> list[Any] | None:
    """Log-probabilities of the tokens, as they are in 32 bits, which is how one of the servers writes them."""
    if logprobs is None:
        return None
    chat = logprobs.get("content")
    values = logprobs["token_logprobs"] if chat is None else [one["logprob"] for one in chat]
    return [value if value is None else float(np.float32(value)) for value in values]


def check_texts(url: str, own: str) -> None:
    """The same answers as those of `quire serve`."""
    for path, body in CASES:
        got, expected = asked(url, path, body), asked(own, path, body)
        assert got == expected, f"{body}:\n{str(got)[:1500]}\n{str(expected)[:1500]}"


def check_streams(url: str, own: str) -> None:
    """Streams hold the whole text."""
    for path, body in (
        (COMPLETIONS, {**STORY, "max_tokens": 60, "seed": 2}),
        (CHAT, {**TALK, "max_tokens": 60, "seed": 2}),
    ):
        assert stream_text(url, path, body) == asked(own, path, body)["text"]


def check_several(url: str, own: str) -> None:
    """vllm-rs takes n = 1 alone: seeds that follow each other give what n sequences give here."""
    body = {**STORY, "max_tokens": 20, "seed": 7}
    several = httpx.post(f"{own}{COMPLETIONS}", json={**body, "n": 3}, timeout=120).json()["choices"]
    assert [asked(url, COMPLETIONS, {**body, "seed": 7 + index})["text"] for index in range(3)] == [
        one["text"] for one in several
    ]


def check_refusals(url: str, own: str) -> None:
    """What is not served is refused by name, with the status of a caller's mistake."""
    for fields, word in REFUSED:
        status, message = asked(url, COMPLETIONS, {**STORY, "max_tokens": 3, **fields})
        assert status == 400 and word in message, (status, message)


def check_calls(url: str, own: str) -> None:
    """What operators call."""
    for path, body in (("/reset_prefix_cache", b""), ("/pause?mode=keep", b""), ("/resume", b"")):
        assert httpx.post(f"{url}{path}", content=body).status_code == 200, path
    assert httpx.get(f"{url}/is_sleeping").json() == {"is_sleeping": False}
    assert "sleep level 1 is not supported" in httpx.post(f"{url}/sleep?level=1").text


def check_disconnect(url: str, own: str) -> None:
    """A client that leaves ends its request."""
    with httpx.stream("POST", f"{url}{COMPLETIONS}", json={**LONG, "max_tokens": 2000, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept, as the connection is closed with it
        next(lines)
        wait_until(lambda: metric(url, "vllm:num_requests_running") == 1, "the request runs")
    wait_until(lambda: metric(url, "vllm:num_requests_running") == 0, "the request has ended")


def check_metrics(url: str, own: str) -> None:
    """Its metrics are fed by this engine."""
    shared = {**STORY, "prompt": "The cat sat on the mat. " * 40, "max_tokens": 1}
    for _ in range(2):
        asked(url, COMPLETIONS, shared)
    assert metric(url, "vllm:prefix_cache_hits_total") > 0
    assert metric(url, "vllm:request_queue_time_seconds_count") > 0


def check_killed_core(url: str, own: str, pid: int) -> None:
    """A stream outlives its engine core, with the same bytes."""
    undisturbed = stream_text(url, COMPLETIONS, LONG)

    def kill(count: int) -> None:
        if count == 100:
            os.kill(core_of(pid), signal.SIGKILL)

    assert stream_text(url, COMPLETIONS, LONG, kill) == undisturbed


def check_killed_host(started: Program) -> None:
    """When all of the engine is gone, the front end says so and ends."""
    os.kill(_headless_of(started.pid), signal.SIGKILL)
    wait_until(lambda: started.process.poll() is not None, "vllm-rs has ended", 30.0)
    assert started.process.returncode != 0 and "exited unexpectedly" in started.log


def check_killed_front(program: Path) -> None:
    """An engine whose front end is gone ends, too."""
    with front(program) as (_, started):
        headless = _headless_of(started.pid)
        started.stop(signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{headless}").exists(), "the engine has ended", 60.0)


def _headless_of(pid: int) -> int:
    return int((Path("/proc") / str(core_of(pid)) / "stat").read_text().rpartition(")")[2].split()[1])


def bench(program: Path, url: str) -> str:
    """What vLLM's own benchmark measures, in a line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(program), "bench", "serve", "--backend", "openai", "--endpoint", COMPLETIONS, "--base-url", url,
            "--model", "leaf", "--tokenizer", str(LEAF.absolute()), "--dataset-name", "random",
            "--random-input-len", "128", "--random-output-len", "64", "--num-prompts", "64", "--max-concurrency", "16",
            "--ignore-eos", "--prompt-token-ids", "--disable-tqdm", "--save-result", "--result-dir", folder,
            "--result-filename", "result.json",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300)
        result = json.loads((Path(folder) / "result.json").read_text())
    assert result["completed"] == 64 and result["total_output_tokens"] == 64 * 64, result
    return (
        "vllm-rs bench serve, 64 requests of 128 in and 64 out, 16 at once: "
        f"{result['output_throughput']:.0f} tokens/s, median TTFT {result['median_ttft_ms']:.1f} ms, "
        f"TPOT {result['median_tpot_ms']:.2f} ms"
    )


def main() -> int:
    """Run the checks; 0 = all passed."""
    program = fetched()
    checks: list[Callable[[str, str], None]] = [
        check_texts, check_streams, check_several, check_refusals, check_calls, check_disconnect, check_metrics,
    ]  # fmt: skip
    start = time.monotonic()
    with ServerProcess("--served-model-name", "leaf") as server, front(program) as (url, started):
        own = f"http://127.0.0.1:{server.port}"
        for check in checks:
            check(url, own)
            print(f"{check.__name__}: {(check.__doc__ or '').strip()}")
        check_killed_core(url, own, started.pid)
        print(f"check_killed_core: {(check_killed_core.__doc__ or '').strip()}")
        figure = bench(program, url)
        check_killed_host(started)
        print(f"check_killed_host: {(check_killed_host.__doc__ or '').strip()}")
    check_killed_front(program)
    print(f"check_killed_front: {(check_killed_front.__doc__ or '').strip()}")
    print(figure)
    print(f"vllm-rs {VERSION}: {len(CASES)} answers the same, {len(checks) + 3} of {len(checks) + 3} checks passed "
          f"in {time.monotonic() - start:.0f} s")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
