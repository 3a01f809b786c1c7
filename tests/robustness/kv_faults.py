"""`make test-kv-faults`: whatever happens to a disk behind the KV cache, every answer is that of a cold engine.

COUNT=10000 random faults: files that are changed, cut, torn, emptied, removed, put in each other's place, or of other
weights or another layout; disks that are full or read-only, fail or hang in a system call of a read or a write; and
processes killed at each system call of a write. One in `PER_ENGINE` goes through an engine core with `leaf`, the others
through a store alone. The last line counts wrong tokens, lost requests and faults that no metric shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quire.config.build import build_config
from quire.engine.config_lookup import resolve_config
from quire.engine.core_factory import build_core
from quire.kv_cache.block_hash import hash_full_blocks
from quire.kv_offload import block_file
from quire.kv_offload.block_file import HEADER, write_block_file
from quire.kv_offload.offload_store import OffloadStore
from quire.platforms.detect import detect_platform
from quire.utils.phases import PhaseTimer
from tests.unit.kv_offload.fakes import NAMESPACE, ArrayMemory, content, finished, key, make_store, num_found
from tests.unit.scheduler.harness import make_request

PER_ENGINE = 20
NUM_BLOCKS = 6
HANG_S = 0.1
MAX_TRIES = 100
DAMAGES = ("bit", "cut", "torn", "emptied", "gone", "swapped", "other weights", "other layout", "garbage")
CALLS = {
    "EIO at open": ("open", errno.EIO), "EIO at read": ("preadv", errno.EIO),
    "ENOSPC at write": ("write", errno.ENOSPC),
    "EROFS at open": ("open", errno.EROFS), "EIO at write": ("write", errno.EIO), "hang at read": ("preadv", 0),
    "hang at write": ("write", 0),
}  # fmt: skip
WRITE_CALLS = ("open", "write", "utime", "close", "replace")


@dataclasses.dataclass
class Result:
    """What came of the faults."""

    kinds: Counter[str] = dataclasses.field(default_factory=Counter)
    num_wrong: int = 0
    num_lost: int = 0
    uncounted: list[str] = dataclasses.field(default_factory=list)

    @property
    def num_bad(self) -> int:
        """All that should not be."""
        return self.num_wrong + self.num_lost + len(self.uncounted)


class FaultyCalls:
    """Stands for the module `os` in `block_file`: one of its functions fails, or hangs until `answer` is set."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number
        self.answer = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._name else getattr(os, name)

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        if self._number:
            raise OSError(self._number, os.strerror(self._number))
        self.answer.wait()
        return getattr(os, self._name)(*args, **kwargs)


@contextmanager
def faulty(call: str) -> Iterator[FaultyCalls]:
    """The system calls of block files fail as `CALLS` says."""
    calls = FaultyCalls(*CALLS[call])
    block_file.os = calls  # type: ignore[attr-defined]
    try:
        yield calls
    finally:
        block_file.os = os  # type: ignore[attr-defined]
        calls.answer.set()


def damage(kind: str, files: list[Path], rng: random.Random) -> None:
    """Do this to one of the files, or to two."""
    files = [one for one in files if one.stat().st_size > HEADER.size]  # a busy machine may have left one unread
    path = rng.choice(files)
    data = path.read_bytes()
    place = rng.randrange(len(data))
    if kind == "bit":
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
    elif kind == "cut":
        path.write_bytes(data[:place])
    elif kind == "torn":
        kept = min(place, len(data) - 1)
        path.write_bytes(data[:kept] + bytes(byte ^ 255 for byte in data[kept:]))
    elif kind == "emptied":
        path.write_bytes(b"")
    elif kind == "garbage":
        path.write_bytes(rng.randbytes(len(data)))
    elif kind == "gone":
        path.unlink()
    elif kind == "swapped":
        other = rng.choice([one for one in files if one != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        namespace = key(7) if kind == "other weights" else data[HEADER.size - 104 : HEADER.size - 72]
        size = len(data) - HEADER.size + (0 if kind == "other weights" else 64)
        payload = np.frombuffer(rng.randbytes(size), np.uint8)
        write_block_file(path, namespace, bytes.fromhex(path.stem), payload, 0)


# --- a store alone ---


class StoreFaults:
    """A store with the blocks of one sequence, which are stored anew after each fault."""

    def __init__(self, root: Path, rng: random.Random, result: Result) -> None:
        self._root, self._rng, self._result = root, rng, result
        self._memory = ArrayMemory(2 * NUM_BLOCKS)
        self._store = make_store(root, hang_s=HANG_S, pause_s=0.0, rescan_s=1000.0)
        self._store.start(self._memory)
        self._keys = [key(number) for number in range(NUM_BLOCKS)]
        self._num_jobs = 0

    def close(self) -> None:
        """End its threads."""
        self._store.close(10.0)

    def run(self, kind: str) -> None:
        """Let one fault happen, load and store, and see that it was counted and no block is wrong."""
        self._wait_for_disk()
        self._save_all()
        before = sum(self._store.totals().faults.values())
        if kind in DAMAGES:
            damage(kind, sorted(self._root.rglob("*.kv")), self._rng)
            self._load()
        elif kind.endswith("at write") or kind == "EROFS at open":
            for path in self._root.rglob("*.kv"):
                path.unlink()
            self._store._files.forget(self._keys)  # type: ignore[union-attr]
            with faulty(kind):
                self._save()
        else:
            with faulty(kind):
                self._load()
        if sum(self._store.totals().faults.values()) <= before:
            self._result.uncounted.append(kind)

    def _save_all(self) -> None:
        """Store until all is there: on a busy machine a disk may seem to hang."""
        for _ in range(MAX_TRIES):
            self._save()
            if num_found(self._store, self._keys) == NUM_BLOCKS:
                return
        self._result.num_lost += 1

    def _save(self) -> None:
        self._memory.blocks[:NUM_BLOCKS] = [content(number) for number in range(NUM_BLOCKS)]
        self._num_jobs += 1
        self._store.submit_store(self._num_jobs, self._keys, range(NUM_BLOCKS))
        finished(self._store)

    def _load(self) -> None:
        self._memory.blocks[NUM_BLOCKS:] = 0
        self._num_jobs += 1
        self._store.submit_load(self._num_jobs, self._keys, range(NUM_BLOCKS, 2 * NUM_BLOCKS))
        is_done = bool(finished(self._store).done)
        for number in range(NUM_BLOCKS):
            loaded = self._memory.blocks[NUM_BLOCKS + number]
            is_right = (loaded == content(number)).all()
            self._result.num_wrong += not is_right and (is_done or bool(loaded.any()))

    def _wait_for_disk(self) -> None:
        wait_for_disk(self._store)


def wait_for_disk(store: OffloadStore) -> None:
    """Until no thread of the store is at a block any longer."""
    now = time.monotonic
    while any(lane.busy_s(now()) for lane in store._lanes):
        time.sleep(HANG_S / 10)


# --- killed writes ---


def kill_at(root: Path, call: str, number: int, is_before: bool, result: Result, rng: random.Random) -> None:
    """A child writes a block and is killed at the `number`-th call of this kind; what it leaves is whole or nothing."""
    path = root / key(1).hex()[:2] / f"{key(1).hex()}.kv"
    path.parent.mkdir(parents=True, exist_ok=True)
    had_one = rng.random() < 0.5
    path.unlink(missing_ok=True)
    if had_one:
        write_block_file(path, NAMESPACE, key(1), content(1), 0)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forks beside threads: the child uses none of their locks
        child = os.fork()
    if not child:
        try:
            _die_at(call, number, is_before)
            write_block_file(path, NAMESPACE, key(1), content(1), 0)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    payload = np.empty(len(content(1)), np.uint8)
    if not path.exists():
        result.num_wrong += had_one
        return
    block_file.read_block_file(path, NAMESPACE, key(1), payload)
    result.num_wrong += not (payload == content(1)).all()
    if not os.WIFSIGNALED(status) and not path.exists():
        result.num_lost += 1


def _die_at(call: str, number: int, is_before: bool) -> None:
    real: Callable[..., Any] = getattr(os, call)
    left = [number]

    def die(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return real(*args, **kwargs)
        if not is_before:
            if call == "write":  # a part of it gets there
                real(args[0], bytes(args[1])[: max(1, len(args[1]) // 2)])
            else:
                real(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(os, call, die)


# --- an engine ---


class EngineFaults:
    """An engine core on a directory; each fault is followed by a request whose answer is known."""

    def __init__(self, root: Path, rng: random.Random, result: Result) -> None:
        self._root, self._rng, self._result = root, rng, result
        platform = detect_platform("cpu")
        config = build_config(
            model="leaf", block_size=16, max_model_len=128, num_gpu_blocks_override=24, kv_disk=str(root)
        )
        config, _ = resolve_config(config, platform)
        self._core = build_core(config, platform, PhaseTimer())
        tier = self._core._scheduler._tiers._tiers[0]  # type: ignore[attr-defined]
        tier._prompts.estimate_recompute_s = lambda start, end: None  # `leaf` may be faster than a disk: always load
        self._store: OffloadStore = tier._store
        self._store._pause_s, self._store._hang_s = 0.0, HANG_S
        self._prompts = [[(i * step) % 900 + 5 for i in range(50)] for step in (37, 41, 43)]
        self._num_requests = 0
        self._num_counted = 0
        self._keys = [hash_full_blocks(np.array(one, np.int32), 16, {}) for one in self._prompts]
        self._expected = [self._answer(prompt) for prompt in self._prompts]

    def close(self) -> None:
        """End it."""
        self._core.shutdown()

    def run(self, kind: str) -> None:
        """Let one fault happen, ask, and see that the answer is right and a metric counts the fault."""
        wait_for_disk(self._store)
        number = self._rng.randrange(len(self._prompts))
        self._store_all(number)
        before = self._num_counted
        if kind in DAMAGES:
            damage(kind, self._files_of(number), self._rng)
            self._check(number)
        else:
            if kind.endswith("at write") or kind == "EROFS at open":
                for path in self._files_of(number):
                    path.unlink()
                self._store._files.forget(self._keys[number])  # type: ignore[union-attr]
            with faulty(kind):
                self._check(number)
            wait_for_disk(self._store)
        self._check(number)  # and steps that report what was counted
        if self._num_counted <= before:
            self._result.uncounted.append(f"{kind} (engine)")

    def _store_all(self, number: int) -> None:
        """Ask until all blocks of a prompt are on the disk: on a busy machine it may seem to hang."""
        for _ in range(MAX_TRIES):
            self._check(number)
            wait_for_disk(self._store)
            if len(self._files_of(number)) == len(self._keys[number]) == num_found(self._store, self._keys[number]):
                return
        self._result.num_lost += 1

    def _files_of(self, number: int) -> list[Path]:
        names = {one.hex() for one in self._keys[number]}
        return [path for path in sorted(self._root.rglob("*.kv")) if path.stem in names]

    def _check(self, number: int) -> None:
        if self._answer(self._prompts[number]) != self._expected[number]:
            self._result.num_wrong += 1

    def _answer(self, prompt: list[int]) -> tuple[list[int], list[bytes]]:
        self._num_requests += 1
        request = make_request(self._num_requests, prompt, max_tokens=4, temperature=1.0, logprobs=1)
        self._core.add_request(dataclasses.replace(request, seed=7))
        tokens: list[int] = []
        logprobs: list[bytes] = []
        end = time.monotonic() + 120
        while self._core.has_unfinished_requests():
            if time.monotonic() > end:
                self._result.num_lost += 1
                break
            outputs = self._core.step()
            if outputs is None:
                continue
            tokens += outputs.new_token_ids.tolist()
            if outputs.logprobs is not None:
                logprobs.append(outputs.logprobs.logprobs.tobytes())
            if outputs.stats.offload is not None:
                self._num_counted += sum(outputs.stats.offload.faults.values())
        self._core.reset_prefix_cache()
        return tokens, logprobs


def run(count: int, seed: int = 0, per_engine: int = PER_ENGINE) -> Result:
    """So many faults, of all kinds in turn."""
    rng, result = random.Random(seed), Result()
    kills = [(call, number, is_before) for call in WRITE_CALLS for number in (1, 2) for is_before in (True, False)]
    kills = [one for one in kills if one[1] == 1 or one[0] == "write"]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for one in itertools.islice(itertools.cycle(kills), max(len(kills), count // 10)):
            kill_at(root / "killed", *one, result, rng)  # before there are threads: it forks
            result.kinds[f"SIGKILL at {one[0]}"] += 1
        count -= max(len(kills), count // 10)
        store, engine = StoreFaults(root / "store", rng, result), EngineFaults(root / "engine", rng, result)
        kinds = [*DAMAGES * 4, *CALLS]
        for number in range(count):
            kind = kinds[number % len(kinds)] if number < len(kinds) else rng.choice(kinds)
            (engine if number % per_engine == 0 else store).run(kind)
            result.kinds[kind] += 1
        store.close()
        engine.close()
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    begun = time.monotonic()
    result = run(args.count, args.seed)
    for kind, num in sorted(result.kinds.items()):
        print(f"{num:6} {kind}")
    print(
        f"{sum(result.kinds.values())} faults in {time.monotonic() - begun:.0f} s: {result.num_wrong} wrong tokens or "
        f"blocks, {result.num_lost} lost requests, not counted: {result.uncounted}"
    )
    print(result.num_bad)
    return 1 if result.num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
