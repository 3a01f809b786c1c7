"""`make test-nixl`, `test-mooncake`, `test-tcp-pull`: a prefill and a decode server give the bytes of one server.

Run by a Python that has the connector's package. Greedy, sampled and structured requests, streamed and not, go to the
prefill server, then with its `kv_transfer_params` to the decode server, eight at once, and are compared with what a
server without a connector answers. Every full block of a prompt has to come over the connector. Then the prefill
server's core hangs, and is killed, between the two halves of a request. The last line counts wrong and lost answers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np

from tests.robustness.server_process import ServerProcess, children_of, wait_until

BLOCK_SIZE, NUM_AT_ONCE, MAX_TOKENS, LOAD_TIMEOUT_S = 16, 8, 24, 4
FLAGS = ("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "1200", "--max-model-len", "1024")
PACKAGES = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake-transfer-engine-non-cuda", "TCPConnector": "quire"}
ASK = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
WORDS = """
    mill river barley horse wheel brother lantern keeper winter ship harbour letter garden stone bridge market potato
    spoon chair swallow wire weather morning basket apple coin teacher window carpet violin
""".split()  # noqa: SIM905
SCHEMA = {
    "type": "object", "required": ["name", "count"], "additionalProperties": False,
    "properties": {"name": {"enum": ["Leo", "Mia", "Zoe"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
}  # fmt: skip
Body = dict[str, Any]


def make_bodies(count: int, seed: int) -> list[tuple[str, Body]]:
    """Paths and bodies of requests: greedy, sampled, structured and streamed ones in turn."""
    rng = random.Random(seed)
    shared = " ".join(rng.choices(WORDS, k=60))
    bodies: list[tuple[str, Body]] = []
    for number in range(count):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(20, 200)))
        text = f"{shared} {text}" if number % 3 == 0 else text
        kinds: tuple[Body, ...] = (
            {"temperature": 0, "logprobs": 3},
            {"temperature": 1.0, "seed": number, "logprobs": 2},
            {"temperature": 0.8, "top_p": 0.9, "seed": number, "presence_penalty": 0.5, "stream": True},
        )
        if number % 4 == 3:
            schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
            chat = {"messages": [{"role": "user", "content": text}], "response_format": schema, "seed": number}
            bodies.append(("/v1/chat/completions", {"model": "leaf", "max_tokens": 40, **chat}))
        else:
            body = {"model": "leaf", "prompt": text, "max_tokens": MAX_TOKENS, **kinds[number % 4]}
            bodies.append(("/v1/completions", body))
    return bodies


def ask(url: str, path: str, body: Body) -> Body:
    """A response as one value; what names it or counts for the cache apart. Raises httpx.HTTPError."""
    answer = httpx.post(url + path, json=body, timeout=120)
    answer.raise_for_status()
    if not body.get("stream"):
        value: Body = answer.json()
        return value
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if not answer.text.rstrip().endswith("[DONE]"):
        raise httpx.RemoteProtocolError("a stream was cut")
    text = "".join(choice.get("text") or "" for chunk in chunks for choice in chunk["choices"])
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    return {"choices": [{"text": text, "finish_reason": reasons}]}


def content(response: Body) -> str:
    """What must be equal: text, reason of the end, log-probabilities (of 32 bits: a router may write them anew)."""
    keys = ("text", "message", "finish_reason", "logprobs")
    text = json.dumps([{key: one.get(key) for key in keys} for one in response["choices"]], sort_keys=True)
    return json.dumps(json.loads(text, parse_float=lambda digits: float(np.float32(digits))), sort_keys=True)


class Pair:
    """A prefill and a decode server of a connector."""

    def __init__(self, stack: ExitStack, connector: str) -> None:
        def transfer(role: str) -> str:
            limits = {"kv_port": 0, "kv_load_timeout_s": LOAD_TIMEOUT_S}
            return json.dumps({"kv_connector": connector, "kv_role": role, **limits})

        self.prefill = stack.enter_context(ServerProcess(*FLAGS, "--kv-transfer-config", transfer("kv_producer")))
        self.decode = stack.enter_context(ServerProcess(*FLAGS, "--kv-transfer-config", transfer("kv_consumer")))

    def prefill_params(self, path: str, body: Body) -> Body:
        """What the prefill server answers for the decode server."""
        first = {**body, "max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": ASK}
        params: Body = ask(f"http://127.0.0.1:{self.prefill.port}", path, first)["kv_transfer_params"]
        return params

    def answer(self, path: str, body: Body, params: Body) -> Body:
        """What the decode server answers."""
        return ask(f"http://127.0.0.1:{self.decode.port}", path, {**body, "kv_transfer_params": params})


def counts_of(server: ServerProcess) -> Counter[str]:
    """What a server's connector counted, by event."""
    page = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    found: Counter[str] = Counter()
    for line in page.splitlines():
        if line.startswith("quire:kv_connector_total{"):
            found[re.findall('event="(\\w+)"', line)[0]] += int(float(line.rpartition(" ")[2]))
    return found


class Check:
    """Requests, and the answers of a server without a connector."""

    def __init__(self, count: int, seed: int) -> None:
        self.bodies = make_bodies(count, seed)
        with ServerProcess(*FLAGS) as plain, ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            url = f"http://127.0.0.1:{plain.port}"
            self.expected = list(threads.map(lambda one: content(ask(url, *one)), self.bodies))
        self.num_asked = self.num_wrong = self.num_lost = 0

    def compare(self, numbers: Sequence[int], answer: Callable[[int], Body]) -> None:
        """Ask for answers, and count those that are wrong or are not there."""
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            for number, found in zip(numbers, threads.map(lambda one: _tried(answer, one), numbers), strict=True):
                self.num_asked += 1
                self.num_lost += found is None
                is_wrong = found is not None and content(found) != self.expected[number]
                self.num_wrong += is_wrong
                if is_wrong or found is None:
                    print(f"request {number}: {found}\nexpected: {self.expected[number]}", file=sys.stderr)


def _tried(answer: Callable[[int], Body], number: int) -> Body | None:
    try:
        return answer(number)
    except (httpx.HTTPError, KeyError) as error:
        print(f"request {number}: {error!r}", file=sys.stderr)
        return None


def run(connector: str, count: int, seed: int) -> int:
    """How many answers were wrong or lost, and what was not counted as it should be."""
    check = Check(count, seed)
    with ExitStack() as stack:
        pair = Pair(stack, connector)
        num_tokens: list[int] = []

        def both(number: int) -> Body:
            params = pair.prefill_params(*check.bodies[number])
            num_tokens.append(params["remote_num_tokens"])
            return pair.answer(*check.bodies[number], params)

        check.compare(range(count), both)
        counts = counts_of(pair.decode)
        print(f"{count} requests prefilled by one server, decoded by another; {dict(counts)}", flush=True)
        problems = sum(counts[name] for name in ("failed_blocks", "failed_jobs", "late_loads", "errors"))
        least = sum(num_tokens) // BLOCK_SIZE - count  # blocks that another request brought are not loaded again
        problems += counts["loaded_blocks"] < least // 2
        for what, number in (("hangs", signal.SIGSTOP), ("is killed", signal.SIGKILL)):
            bodies = [salted(*body, what) for body in check.bodies[:NUM_AT_ONCE]]
            params = [pair.prefill_params(*body) for body in bodies]
            core = pair.prefill.core_pid
            os.kill(core, number)
            answers = functools.partial(answer_with, pair, bodies, params)
            check.compare(range(NUM_AT_ONCE), answers)
            with contextlib.suppress(ProcessLookupError):  # one that hangs is ended by its front-end
                os.kill(core, signal.SIGKILL)
            wait_until(lambda core=core: core not in children_of(pair.prefill.pid), "the core is gone")
            wait_until(lambda: len(children_of(pair.prefill.pid)) == 1 and is_healthy(pair.prefill), "a new core")
            after = counts_of(pair.decode)
            print(f"the prefill server's core {what}: {dict(after - counts)}", flush=True)
            problems += after["failed_jobs"] + after["late_loads"] <= counts["failed_jobs"] + counts["late_loads"]
            counts = after
        check.bodies = [salted(*body, "again") for body in check.bodies]
        check.compare(range(NUM_AT_ONCE), both)
        print(f"with its next core: {dict(counts_of(pair.decode) - counts)}", flush=True)
        problems += counts_of(pair.decode)["loaded_blocks"] <= counts["loaded_blocks"]
        num_blocks = counts_of(pair.decode)["loaded_blocks"]
    version = importlib.metadata.version(PACKAGES[connector])
    print(
        f"{connector} ({PACKAGES[connector]} {version}): {check.num_asked} requests, {num_blocks} blocks read, "
        f"2 prefill cores lost; wrong {check.num_wrong}, lost {check.num_lost}, not counted as it should be {problems}"
    )
    return check.num_wrong + check.num_lost + problems


def salted(path: str, body: Body, salt: str) -> tuple[str, Body]:
    """A request that finds no block of those before it."""
    return path, {**body, "cache_salt": salt}


def answer_with(pair: Pair, bodies: list[tuple[str, Body]], params: list[Body], number: int) -> Body:
    """The decode server's answer to a request that was prefilled before."""
    return pair.answer(*bodies[number], params[number])


def is_healthy(server: ServerProcess) -> bool:
    """Whether a server's core answers."""
    try:
        return httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connector", choices=PACKAGES, default="TCPConnector")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    raise SystemExit(min(1, run(args.connector, args.requests, args.seed)))


if __name__ == "__main__":
    main()
