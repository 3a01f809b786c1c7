"""Where the time of a decode step goes: each kind of kernel, and every part of the engine around them.

    python -m benchmarks.engine.bench_step --model build/checkpoints/qwen-0.5b --batch-sizes 1,64

Every call of the native library and every named part of a step is a section; a section's time is its own, without that
of the sections inside it. What reading the clock costs is measured first and taken off. The share outside kernels is
all that is not inside the native library. With the clock "thread" (the default) only this thread's work counts, so
figures hold on a shared machine, for one thread. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from benchmarks import workload
from benchmarks.engine.bench_cpu import submit
from quire import LLM

CLOCKS: dict[str, Callable[[], float]] = {"thread": time.thread_time, "wall": time.perf_counter}
PROMPT_LEN = 32
NUM_WARM_STEPS = 10
NUM_CALIBRATIONS = 20_000
KERNEL = "kernel "


class Sections:
    """Time by section, each without the sections inside it.

    Attributes:
        seconds, counts: by name, while `is_on`.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._inside: list[float] = []
        self._entry_s = 0.0
        self.is_on = False
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    def calibrate(self) -> None:
        """Measure what an empty section costs the one around it."""
        empty = self.wrap("empty", lambda: None)
        loop = self.wrap("loop", lambda: [empty() for _ in range(NUM_CALIBRATIONS)])
        self.is_on = True
        loop()
        self.is_on = False
        self._entry_s = self.seconds["loop"] / NUM_CALIBRATIONS
        self.reset()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a section."""

        @wraps(function)
        def section(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return function(*args, **kwargs)
            self._inside.append(0.0)
            start = self._clock()
            try:
                return function(*args, **kwargs)
            finally:
                whole = self._clock() - start
                self.seconds[name] += whole - self._inside.pop()
                self.counts[name] += 1
                if self._inside:
                    self._inside[-1] += whole + self._entry_s

        return section

    def wrap_method(self, owner: Any, attribute: str, name: str) -> None:
        """Make an attribute of an object, class or module a section."""
        setattr(owner, attribute, self.wrap(name, getattr(owner, attribute)))


class TimedLibrary:
    """The native library with every function a section."""

    def __init__(self, library: Any, sections: Sections) -> None:
        self._library, self._sections = library, sections

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if not isinstance(found, type) and callable(found):
            found = self._sections.wrap(KERNEL + name, found)
        setattr(self, name, found)
        return found


def make_llm(args: argparse.Namespace, sections: Sections, num_seqs: int) -> LLM:
    """The engine, with its parts as sections."""
    from quire.kernels.native import runtime  # late: they load torch
    from quire.models.decoder import DecoderForCausalLM
    from quire.sample.sampler import Sampler
    from quire.scheduler.scheduler import Scheduler
    from quire.worker import model_runner
    from quire.worker.attention_groups import AttentionGroups
    from quire.worker.sampling_step import SamplingStep

    timed = TimedLibrary(runtime.load_library(), sections)
    runtime.load_library = lambda: timed
    for owner, attribute, name in (
        (Scheduler, "schedule", "schedule"),
        (Scheduler, "update_from_output", "update"),
        (model_runner, "prepare_inputs", "prepare inputs"),
        (AttentionGroups, "forward_context", "attention metadata"),
        (DecoderForCausalLM, "forward", "model, between kernels"),
        (DecoderForCausalLM, "compute_logits", "logits, between kernels"),
        (Sampler, "sample", "sampler"),
        (SamplingStep, "run", "sampling step"),
        (model_runner.ModelRunner, "execute_model", "runner"),
    ):
        sections.wrap_method(owner, attribute, name)
    settings = {
        "num_threads": args.num_threads, "quantization": args.quantization, "max_num_seqs": num_seqs,
        "speculative_config": "off",
    }  # fmt: skip
    given = {name: value for name, value in settings.items() if value is not None}
    llm = LLM(args.model, enable_prefix_caching=False, kv_cache_memory_bytes=int(args.kv_cache_gib * 2**30), **given)
    engine = llm.llm_engine
    engine.step = sections.wrap("front-end and rest", engine.step)  # type: ignore[method-assign]
    return llm


def measure(llm: LLM, sections: Sections, num_reqs: int, num_steps: int, clock: Callable[[], float]) -> dict[str, Any]:
    """One batch size: the median step without sections, and the median of every section."""
    engine = llm.llm_engine
    output_len = 2 * num_steps + NUM_WARM_STEPS + 100
    assert engine.config.arch is not None, "the engine resolved its configuration"
    rng, vocab_size = random.Random(0), engine.config.arch.vocab_size
    ids = submit(llm, [[rng.randrange(vocab_size) for _ in range(PROMPT_LEN)] for _ in range(num_reqs)], output_len)
    for _ in range(NUM_WARM_STEPS):
        engine.step()
    plain = []
    for _ in range(num_steps):
        start = clock()
        engine.step()
        plain.append(clock() - start)
    assert engine.last_stats.num_scheduled_tokens == num_reqs, "every step must be a decode step of all requests"
    steps = []
    for _ in range(num_steps):
        sections.reset()
        sections.is_on = True
        engine.step()
        sections.is_on = False
        steps.append(sections.seconds)
    engine.discard_requests(ids)
    while engine.has_unfinished_requests():
        engine.step()
    parts = {name: statistics.median(step[name] for step in steps) for name in steps[-1]}
    step_s = sum(parts.values())
    kernel_s = sum(seconds for name, seconds in parts.items() if name.startswith(KERNEL))
    return {
        "step_us": 1e6 * statistics.median(plain),
        "step_in_sections_us": 1e6 * step_s,
        "outside_us": 1e6 * (step_s - kernel_s),
        "outside_share": 1 - kernel_s / step_s,
        "parts_us": {name: 1e6 * seconds for name, seconds in sorted(parts.items(), key=lambda part: -part[1])},
        "calls": {name: sections.counts[name] for name in parts},
        "load": workload.load_average(),
    }


def print_result(num_reqs: int, result: dict[str, Any]) -> None:
    """The table of one batch size."""
    print(f"\n{num_reqs} decoding: {result['step_us']:.0f} us a step, {result['outside_share']:.1%} outside kernels")
    print(f"{'':36} {'us/step':>10} {'share':>7} {'calls':>7}")
    for name, us in result["parts_us"].items():
        share = us / result["step_in_sections_us"]
        print(f"{name:36} {us:>10.1f} {share:>7.1%} {result['calls'][name]:>7}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help='directory of a checkpoint, or "leaf"')
    parser.add_argument("--quantization")
    parser.add_argument("--batch-sizes", default="1,64", help="requests that decode together; default: 1,64")
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--clock", choices=CLOCKS, default="thread", help="thread: for one thread on a shared machine")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    sizes = [int(size) for size in args.batch_sizes.split(",")]
    clock = CLOCKS[args.clock]
    sections = Sections(clock)
    sections.calibrate()
    llm = make_llm(args, sections, max(sizes))
    results = {size: measure(llm, sections, size, args.num_steps, clock) for size in sizes}
    llm.shutdown()
    for size, result in results.items():
        print_result(size, result)
    settings = {"clock": args.clock, "num_threads": args.num_threads, "quantization": args.quantization}
    workload.print_json({"model": args.model, **settings, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
