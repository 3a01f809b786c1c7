"""`make fuzz-server`: hostile requests against `quire serve`, beside eight streams that must not notice.

Half of the cases walk every field of every API through every hostile value, the others are random; which is which
follows from the seed and the number of the case alone, so that each can be played again by itself. The last line is
the figure; the exit code is 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.robustness.server_fuzz import bodies, wires
from tests.robustness.server_fuzz.canaries import Canaries
from tests.robustness.server_fuzz.cases import Case, http, rng_of
from tests.robustness.server_fuzz.client import GIVE_UP_S, Connection, Player, Progress
from tests.robustness.server_fuzz.judge import LOG, complaints
from tests.robustness.server_fuzz.processes import Levels, Served, num_files, schema_complaints

MAX_SHOWN = 20
SETTLE_S = 15.0


class Cases:
    """The cases of a seed, by number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._systematic = bodies.systematic()
        random.Random(seed).shuffle(self._systematic)

    def case(self, index: int) -> Case:
        """Case `index`."""
        rng = rng_of(self._seed, index)
        if index % 2 == 0:
            target, name, value = self._systematic[index // 2 % len(self._systematic)]
            return bodies.one_field(target, name, value, stream=rng.random() < 0.3)
        kind = rng.random()
        if kind < 0.4:
            return bodies.many_fields(rng)
        if kind < 0.6:
            return bodies.broken_json(rng)
        return rng.choice(wires.QUICK if kind < 0.985 else wires.LONG)(rng)


class Run:
    """One run against one server.

    Attributes:
        failures: what was wrong, in words.
        counts: cases by kind; statuses by number.
    """

    def __init__(self, served: Served, seed: int) -> None:
        self._served = served
        self._seed = seed
        self._cases = Cases(seed)
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.levels = Levels()
        self.canaries = Canaries(served.port)
        self.num_schema_cases = 0
        self._progress = Progress(GIVE_UP_S)

    async def run(self, indices: Sequence[int], num_players: int, schema_examples: int = 0) -> None:
        """Play the cases of `indices` and those of the schema, then wait for the server to come to rest."""
        pids = self._served.pids()
        await self.canaries.start()
        at_rest = [num_files(pid) for pid in pids]
        watch = asyncio.create_task(self._watch(pids, len(indices)))
        waiting = iter(indices)
        await asyncio.gather(*(self._play(waiting) for _ in range(num_players)))
        if schema_examples:
            self.num_schema_cases, found = await schema_complaints(self._served.port, self._seed, schema_examples)
            self.failures += found
        await self.canaries.stop()
        watch.cancel()
        self.failures += self.canaries.differences
        self.failures += self.levels.complaints()
        await self._check_rest(pids, at_rest)

    async def _play(self, indices: object) -> None:
        player = Player(self._served.port, self._progress, self.statuses.total)
        for index in indices:  # type: ignore[attr-defined]
            case = self._cases.case(index)
            self.counts[case.kind] += 1
            try:
                outcome = await player.play(case)
            except OSError as error:
                self._fail(index, case, f"cannot connect: {error}")
                break
            self.statuses.update(answer.status for answer in outcome.answers)
            for complaint in complaints(case, outcome):
                self._fail(index, case, complaint)
        player.close()

    def _fail(self, index: int, case: Case, complaint: str) -> None:
        self.failures.append(complaint)
        if len(self.failures) <= MAX_SHOWN:
            print(f"case {index} ({case.kind}): {complaint}\n  sent {[_short(part) for part in case.sends]}")
            print(f"  again: python -m tests.robustness.fuzz_server --seed {self._seed} --only {index}", flush=True)

    async def _watch(self, pids: tuple[int, int], total: int) -> None:
        start = last = time.monotonic()
        while True:
            self.levels.note(pids)
            await asyncio.sleep(1)
            if time.monotonic() - last > 30:
                last, done = time.monotonic(), sum(self.counts.values())
                print(f"{done} of {total}, {done / (last - start):.0f}/s, {self.canaries.num_compared} canaries, "
                      f"{len(self.failures)} failures, {self.levels.samples[-1]}", flush=True)  # fmt: skip

    async def _check_rest(self, pids: tuple[int, int], at_rest: list[int]) -> None:
        """Nothing runs, nothing is left open, nothing was replaced, the log is quiet."""
        progress = Progress(SETTLE_S)
        while True:
            excess = [num_files(pid) - before for pid, before in zip(pids, at_rest, strict=True)]
            load = await self._get("/load")
            if load == b'{"server_load":0}' and max(excess) <= 2:
                break
            if progress.has_stopped((load, excess)):
                self.failures.append(f"at rest: load {load!r}, {excess} files more than before")
                break
            await asyncio.sleep(0.1)
        if not self._served.is_alive or self._served.pids() != pids:
            self.failures.append("a process ended or was replaced")
        if not re.search(rb"^quire:engine_restarts\S* 0(\.0)?$", await self._get("/metrics"), re.MULTILINE):
            self.failures.append("the engine was restarted")
        loud = [line for line in self._served.log.read_text(errors="replace").splitlines() if LOG.search(line)]
        self.failures += [f"log: {line[:300]}" for line in loud[:MAX_SHOWN]]

    async def _get(self, path: str) -> bytes:
        connection = await Connection.open(self._served.port)
        try:
            connection.writer.write(http(path, method="GET"))
            return (await connection.answer("GET")).body
        finally:
            connection.close()


def _short(part: bytes | float) -> bytes | float:
    return part if isinstance(part, float) or len(part) < 600 else part[:600] + b"... (%d bytes)" % len(part)


def main() -> int:
    """Exit code 0 when the server took everything."""
    parser = argparse.ArgumentParser(prog="make fuzz-server")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40))
    parser.add_argument("--players", type=int, default=16)
    parser.add_argument("--only", type=int, help="play one case")
    parser.add_argument("--schema", action="store_true", help="run schemathesis, too")
    parser.add_argument("--log", help="keep the server's log here")
    args = parser.parse_args()
    indices = list(range(args.requests)) if args.only is None else [args.only]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends, too
    print(f"seed {args.seed}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Served(Path(folder)) as served:
        run = Run(served, args.seed)
        asyncio.run(run.run(indices, args.players, max(10, args.requests // 500) if args.schema else 0))
        if args.log:
            Path(args.log).write_bytes(served.log.read_bytes())
    for failure in run.failures[:MAX_SHOWN]:
        print(f"failure: {failure}")
    seconds = time.monotonic() - start
    print(f"cases {dict(run.counts)}\nstatuses {dict(sorted(run.statuses.items()))}")
    if run.levels.samples:
        first, last = run.levels.samples[0], run.levels.samples[-1]
        print(f"MiB and open files of front end and core: first {first}, last {last}, growth {run.levels.growth()}")
    print(f"fuzz-server: {len(indices)} requests and {run.num_schema_cases} of schemathesis in {seconds:.0f} s, "
        f"{run.canaries.num_compared} canary streams, "
          f"{len(run.failures)} failures")  # fmt: skip
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
