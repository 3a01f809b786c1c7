"""What grammars that are dear to compile cost the others: inter-token latency of 16 streams, with a request that asks
for such a grammar every 100 ms, and without.

Run alone on the machine:

    python -m benchmarks.engine.bench_adversarial --rounds 6 --phase-s 8

Quiet and adversarial phases take turns, so that drift falls on both. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import time
from collections import Counter
from typing import Any

import numpy as np

from benchmarks.adversarial import FORMS
from quire import SamplingParams
from quire.config.build import build_config
from quire.core.sampling_params import RequestOutputKind
from quire.engine.async_llm import AsyncLLM
from quire.errors import QuireError

PROMPT = "Once upon a time"


Attack = tuple[str, int, dict[str, Any]]


def made_forms(names: list[str], first: int, count: int) -> list[Attack]:
    """Made before anything is measured, as if by other machines."""
    numbered = [(names[number % len(names)], number) for number in range(first, first + count)]
    return [(name, number, FORMS[name](number)) for name, number in numbered]


class Load:
    """Streams that never end, and what is between their tokens.

    Attributes:
        gaps: seconds, of the phase under way; None = nobody listens.
        outcomes: (form, how its requests ended) -> how often.
    """

    def __init__(self, engine: AsyncLLM, max_tokens: int) -> None:
        self.engine = engine
        self.max_tokens = max_tokens
        self.gaps: list[float] | None = None
        self.outcomes: Counter[tuple[str, str]] = Counter()

    async def stream(self, name: str) -> None:
        """One neighbour; when its answer is as long as can be it asks again."""
        for turn in itertools.count():
            params = SamplingParams(
                max_tokens=self.max_tokens, ignore_eos=True, seed=turn, output_kind=RequestOutputKind.DELTA
            )
            last = None
            async for _ in self.engine.generate(f"{PROMPT} {name}", params, f"{name}-{turn}"):
                now = time.perf_counter()
                if last is not None and self.gaps is not None:
                    self.gaps.append(now - last)
                last = now

    async def attack(self, name: str, number: int, form: dict[str, Any]) -> None:
        """One request with a dear grammar."""
        try:
            params = SamplingParams(max_tokens=4, structured_outputs=form)  # type: ignore[arg-type]
            async for _ in self.engine.generate(PROMPT, params, f"{name}-{number}"):
                pass
            self.outcomes[name, "compiled"] += 1
        except QuireError as error:
            self.outcomes[name, "over budget" if " takes more than " in str(error) else "refused"] += 1

    async def phase(self, seconds: float, interval_s: float, forms: list[Attack]) -> list[float]:
        """Gaps of a phase in which an adversarial request comes every `interval_s`, as long as there are `forms`."""
        self.gaps = []
        end, attacks = time.perf_counter() + seconds, []
        for name, number, form in forms:
            attacks.append(asyncio.create_task(self.attack(name, number, form)))
            await asyncio.sleep(interval_s)
        await asyncio.sleep(max(0.0, end - time.perf_counter()))
        gaps, self.gaps = self.gaps, None
        for one in attacks:
            one.cancel()
        results = await asyncio.gather(*attacks, return_exceptions=True)
        for (name, _, _), result in zip(forms, results, strict=True):
            if isinstance(result, asyncio.CancelledError):
                self.outcomes[name, "not answered in its phase"] += 1
            elif result is not None:
                self.outcomes[name, type(result).__name__] += 1
        return gaps


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the phases."""
    config = build_config(max_model_len=2048, max_num_seqs=args.streams + 16, enable_prefix_caching=False)
    engine = AsyncLLM.from_config(config)
    names = args.forms.split(",") if args.forms else list(FORMS)
    num_attacks = int(args.phase_s / args.interval_s)
    attacks = [made_forms(names, (turn + 1) * 100_000, num_attacks) for turn in range(args.rounds)]
    gc.collect()
    gc.freeze()  # what the attackers hold is not looked at by this process's collector
    load = Load(engine, 1900)
    tasks = [asyncio.create_task(load.stream(f"s{index}")) for index in range(args.streams)]
    gaps: dict[bool, list[list[float]]] = {False: [], True: []}
    try:
        await asyncio.sleep(args.phase_s / 2)
        await load.attack("exponential_regex", 0, FORMS["exponential_regex"](0))  # starts the workers
        for turn in range(args.rounds):
            for is_attacked in (False, True) if turn % 2 == 0 else (True, False):
                forms = attacks[turn] if is_attacked else []
                gaps[is_attacked].append(await load.phase(args.phase_s, args.interval_s, forms))
                await asyncio.sleep(args.rest_s)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        engine.shutdown()
    p99 = {kind: [float(np.percentile(one, 99)) for one in found] for kind, found in gaps.items()}
    all_gaps = {kind: np.concatenate(found) for kind, found in gaps.items()}
    stalled_s, attacked_s = (float(np.percentile(all_gaps[kind], 99)) for kind in (False, True))
    return {
        "streams": args.streams, "interval_s": args.interval_s, "rounds": args.rounds, "phase_s": args.phase_s,
        "quiet_p50_s": float(np.percentile(all_gaps[False], 50)),
        "adversarial_p50_s": float(np.percentile(all_gaps[True], 50)),
        "quiet_p99_s": stalled_s, "adversarial_p99_s": attacked_s, "p99_ratio": attacked_s / stalled_s,
        "p99_ratio_median_of_rounds": float(np.median(np.array(p99[True]) / np.array(p99[False]))),
        "quiet_p99_by_round_s": p99[False], "adversarial_p99_by_round_s": p99[True],
        "outcomes": {f"{name}: {outcome}": count for (name, outcome), count in sorted(load.outcomes.items())},
    }  # fmt: skip


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="What dear grammars cost the others.")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--phase-s", type=float, default=8.0)
    parser.add_argument("--rest-s", type=float, default=2.5, help="between phases, for grammars under way")
    parser.add_argument("--interval-s", type=float, default=0.1)
    parser.add_argument("--forms", default="", help=f"some of {', '.join(FORMS)}")
    figures = asyncio.run(measure(parser.parse_args()))
    for name, count in figures["outcomes"].items():
        print(f"  {name}: {count}")
    quiet, attacked = figures["quiet_p99_s"], figures["adversarial_p99_s"]
    print(f"p99 between tokens: quiet {1e3 * quiet:.2f} ms, with dear grammars {1e3 * attacked:.2f} ms")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
