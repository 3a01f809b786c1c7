"""Prefetch on traces: how many blocks come from host memory with and without it, and what it reads in vain.

    python -m benchmarks.engine.bench_kv_prefetch

Counts, not times: the policies of `kv_offload` over a pretended disk, so figures are the same on every machine. What
was read ahead counts as in host memory when it is loaded after that. The last line is one JSON object.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

from quire.kv_offload.policies.lru import LRUPolicy
from quire.kv_offload.readahead import Readahead

Trace = list[tuple[list[bytes], int]]
"""Requests: the blocks of each, and how many of the first ones are in the KV cache, so that they are not loaded."""
HOST_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class Result:
    """Blocks that were loaded, those of them that were in host memory, and those read ahead that were never used."""

    num_loaded: int
    num_from_host: int
    num_read_ahead: int
    num_wasted: int

    @property
    def wasted_share(self) -> float:
        """Of the loaded blocks."""
        return self.num_wasted / max(1, self.num_loaded)


def replay(trace: Trace, *, is_reading_ahead: bool) -> Result:
    """Load a trace over `HOST_BLOCKS` of host memory; all blocks are on the disk and were stored in their order."""
    host, readahead, unused = LRUPolicy(HOST_BLOCKS), Readahead(), set[bytes]()
    num_loaded = num_from_host = num_read_ahead = num_wasted = 0
    for blocks, num_cached in trace:
        loaded = blocks[num_cached:]
        for key in loaded:
            num_loaded += 1
            if key in host:
                num_from_host += 1
                host.touch(key)
                unused.discard(key)
                continue
            for evicted in host.insert(key, 1):
                num_wasted += evicted in unused
                unused.discard(evicted)
        if is_reading_ahead:
            for key in readahead.propose(loaded, host.__contains__):
                num_read_ahead += 1
                unused.add(key)
                for evicted in host.insert(key, 1):
                    num_wasted += evicted in unused
                    unused.discard(evicted)
        readahead.learn(blocks)
    return Result(num_loaded, num_from_host, num_read_ahead, num_wasted + len(unused))


def documents(num_requests: int = 4000, seed: int = 0) -> Trace:
    """20 documents of 64 blocks, of which each request about one has 8 more than the one before."""
    rng, ends, trace = random.Random(seed), dict[int, int](), Trace()
    for _ in range(num_requests):
        number = rng.randrange(20)
        start = ends.get(number, 0) % 64
        ends[number] = start + 8
        trace.append(([b"document %d %d" % (number, i) for i in range(start + 8)], start))
    return trace


def scan(num_requests: int = 4000) -> Trace:
    """Prompts that come once."""
    return [([b"scan %d %d" % (number, i) for i in range(8)], 0) for number in range(num_requests)]


def branches(num_requests: int = 8000, seed: int = 0) -> Trace:
    """Prompts that are one of 200 beginnings, after each of which another one goes on as none did before."""
    rng, trace = random.Random(seed), Trace()
    for number in range(num_requests):
        beginning = [b"beginning %d %d" % (rng.randrange(200), 0)]
        beginning += [beginning[0] + b" %d" % i for i in range(1, 8)]
        trace.append((beginning, 0))
        trace.append(([*beginning, *(b"end %d %d" % (number, i) for i in range(8))], 8))
    return trace


TRACES = {"documents": documents, "scan": scan, "branches": branches}


def main() -> None:
    """Replay all traces."""
    results = {}
    for name, make in TRACES.items():
        without, ahead = (replay(make(), is_reading_ahead=one) for one in (False, True))
        results[name] = {"without": asdict(without), "with": asdict(ahead), "wasted_share": ahead.wasted_share}
        shares = [one.num_from_host / one.num_loaded for one in (without, ahead)]
        print(f"{name:10} from host memory {shares[0]:6.1%} -> {shares[1]:6.1%}, read in vain {ahead.wasted_share:.2%}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
