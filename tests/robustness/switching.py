"""`make switching`: requests in random order to three models with room for two, while cores are killed and one more
model never loads. No request may be lost, and each answer must be that of its model alone.

The small version is a test of the suite (`tests/server/test_switching_cores.py`).
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from quire import LLM, SamplingParams
from quire.config.switching import read_models_file
from quire.server.switching.loader import CoreLoader
from tests.models.checkpoints import make_checkpoint
from tests.robustness.server_process import ServerProcess, children_of

FAMILIES = ("llama", "qwen2", "mistral")
BROKEN = "broken"
SETTINGS = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 4 << 20, "num_threads": 1}
KILL_S = 4.0
CLIENTS = 8
TRIES = 20


@dataclass(frozen=True)
class Asked:
    """A request: model, prompt, and seed (None = greedy)."""

    model: str
    prompt: str
    seed: int | None

    def body(self, max_tokens: int) -> dict[str, Any]:
        """For /v1/completions."""
        sampling = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        return {"model": self.model, "prompt": self.prompt, "max_tokens": max_tokens, **sampling}


@dataclass
class Outcome:
    """What became of the requests.

    Attributes:
        num_retried: answers that said to come again, after a core was killed during its start.
        waits: seconds that requests waited for their model, by the server's header.
    """

    num_right: int = 0
    num_refused: int = 0
    num_retried: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


def write_models(directory: Path) -> Path:
    """Three checkpoints, one that is broken, and the file that names them, with a budget for two; its path."""
    for seed, family in enumerate(FAMILIES):
        make_checkpoint(family, directory / family, seed=seed)
    make_checkpoint("llama", directory / BROKEN)
    weights = directory / BROKEN / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    lines = [f"  {name}: {{model: {directory / name}}}" for name in (*FAMILIES, BROKEN)]
    path = directory / "models.yaml"
    path.write_text("\n".join(["models:", *lines]))
    entries = read_models_file(path, SETTINGS).models
    largest = max(CoreLoader(one.name, one.config, 0).measure().num_bytes for one in entries)
    path.write_text("\n".join([f"memory_budget: {int(2.5 * largest)}", "busy_turn_s: 0.5", "models:", *lines]))
    return path


def make_asked(count: int, rng: random.Random) -> list[Asked]:
    """Requests in random order, a few to the model that is broken."""
    names = [*FAMILIES * 6, BROKEN]
    return [
        Asked(rng.choice(names), f"Number {index}: the quick brown fox has {index}", None if index % 3 else index)
        for index in range(count)
    ]


def answers_alone(directory: Path, asked: Sequence[Asked], max_tokens: int) -> dict[Asked, str]:
    """What each model says when it is the only one."""
    expected: dict[Asked, str] = {}
    for family in FAMILIES:
        own = [one for one in asked if one.model == family]
        if not own:
            continue
        llm = LLM(model=str(directory / family), served_model_name=family, **SETTINGS)
        params = [
            SamplingParams(temperature=0.0 if one.seed is None else 1.0, seed=one.seed, max_tokens=max_tokens)
            for one in own
        ]
        outputs = llm.generate([one.prompt for one in own], params, use_tqdm=False)
        expected |= {one: output.outputs[0].text for one, output in zip(own, outputs, strict=True)}
        llm.shutdown()
    return expected


def ask_all(
    url: str, asked: Sequence[Asked], expected: dict[Asked, str], max_tokens: int, num_clients: int = CLIENTS
) -> Outcome:
    """Send all requests, so many at a time, and compare the answers."""
    outcome = Outcome()
    with httpx.Client(timeout=300) as client, concurrent.futures.ThreadPoolExecutor(num_clients) as threads:
        for one, answer in zip(
            asked, threads.map(lambda one: _ask(client, url, one, max_tokens, outcome), asked), strict=True
        ):
            _note(outcome, one, answer, expected)
    return outcome


def _ask(client: httpx.Client, url: str, one: Asked, max_tokens: int, outcome: Outcome) -> httpx.Response | None:
    """The answer to a request; None = there was none."""
    for _ in range(TRIES):
        try:
            answer = client.post(f"{url}/v1/completions", json=one.body(max_tokens))
        except httpx.HTTPError:
            return None
        is_to_come_again = answer.status_code == 503 and "retry-after" in answer.headers
        if not is_to_come_again or one.model == BROKEN:
            return answer
        outcome.num_retried += 1
        time.sleep(float(answer.headers["retry-after"]))
    return answer


def _note(outcome: Outcome, one: Asked, answer: httpx.Response | None, expected: dict[Asked, str]) -> None:
    if answer is None:
        outcome.lost.append(f"{one}: no answer")
        return
    if one.model == BROKEN:
        is_clear = answer.status_code == 503 and answer.json()["error"]["code"] == "model_load_failed"
        outcome.num_refused += is_clear
        if not is_clear:
            outcome.wrong.append(f"{one}: {answer.status_code} {answer.text}")
        return
    if answer.status_code != 200:
        outcome.lost.append(f"{one}: {answer.status_code} {answer.text}")
        return
    text = answer.json()["choices"][0]["text"]
    if text == expected[one]:
        outcome.num_right += 1
    else:
        outcome.wrong.append(f"{one}: {text!r} in place of {expected[one]!r}")
    outcome.waits.append(float(answer.headers.get("x-quire-model-wait", 0.0)))


class Killer:
    """Kills a child of a process, chosen at random, every `KILL_S` seconds or so while it is entered.

    Attributes:
        num_killed: so far.
    """

    def __init__(self, pid: int, rng: random.Random, interval_s: float = KILL_S) -> None:
        self.num_killed = 0
        self._pid, self._rng, self._interval_s = pid, rng, interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(self._interval_s * (0.5 + self._rng.random())):
            children = children_of(self._pid)
            if children:
                with suppress(ProcessLookupError):
                    os.kill(self._rng.choice(children), signal.SIGKILL)
                    self.num_killed += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 when nothing was lost or wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="q") as name:
        directory = Path(name)
        path = write_models(directory)
        asked = make_asked(args.requests, rng)
        expected = answers_alone(directory, asked, args.max_tokens)
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in SETTINGS.items() if key != "num_threads"]
        with ServerProcess("--models", str(path), *flags, model=None) as server:
            url = f"http://127.0.0.1:{server.port}"
            for what in ("undisturbed", "with kills"):
                with Killer(server.pid, rng, KILL_S if what == "with kills" else 1e9) as killer:
                    start_s = time.monotonic()
                    outcome = ask_all(url, asked, expected, args.max_tokens)
                _report(what, outcome, killer.num_killed, time.monotonic() - start_s, _loads(url))
                if outcome.lost or outcome.wrong:
                    print(*outcome.lost[:5], *outcome.wrong[:5], sep="\n")
                    return 1
    print(f"{2 * args.requests} requests to 3 models with room for 2: 0 lost, 0 wrong")
    return 0


def _loads(url: str) -> tuple[int, float]:
    """How many loads there were, and how long all of them took together."""
    count, seconds = 0, 0.0
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("quire:model_load_seconds_count"):
            count += int(float(line.rpartition(" ")[2]))
        elif line.startswith("quire:model_load_seconds_sum"):
            seconds += float(line.rpartition(" ")[2])
    return count, seconds


def _report(what: str, outcome: Outcome, num_killed: int, seconds: float, loads: tuple[int, float]) -> None:
    waits = sorted(one for one in outcome.waits if one)
    median, longest = (statistics.median(waits), waits[-1]) if waits else (0.0, 0.0)
    print(
        f"{what}: {outcome.num_right} right, {outcome.num_refused} refused for a broken model, "
        f"{len(outcome.lost)} lost, {len(outcome.wrong)} wrong, {outcome.num_retried} told to come again, "
        f"{num_killed} processes killed, in {seconds:.1f} s"
    )
    print(
        f"  {len(waits)} waited for their model, median {median:.2f} s, longest {longest:.2f} s; "
        f"{loads[0]} loads so far, mean {loads[1] / max(1, loads[0]):.2f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
