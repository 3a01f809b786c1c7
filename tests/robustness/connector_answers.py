"""Engines with a connector, asked beside one without: what the checks with the packages of other programs share."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from quire.config.build import build_config
from quire.engine.config_lookup import resolve_config
from quire.engine.core_factory import build_core
from quire.platforms.detect import detect_platform
from quire.utils.phases import PhaseTimer
from tests.unit.scheduler.harness import make_request

BLOCK_SIZE, NUM_SHARED, NUM_TOKENS, MAX_TOKENS = 16, 64, 150, 12
PATIENCE_S = 240.0
Answer = tuple[tuple[int, ...], bytes]


def random_prompts(number: int, rng: random.Random) -> list[list[int]]:
    """Prompts of NUM_TOKENS tokens, of which the first NUM_SHARED are the same."""
    shared = [rng.randrange(5, 900) for _ in range(NUM_SHARED)]
    return [shared + [rng.randrange(5, 900) for _ in range(NUM_TOKENS - NUM_SHARED)] for _ in range(number)]


class Engine:
    """An engine core of `leaf`; counts what its connector did."""

    def __init__(self, transfer: dict[str, Any] | None = None) -> None:
        platform = detect_platform("cpu")
        config = build_config(
            model="leaf", block_size=BLOCK_SIZE, max_model_len=256, num_gpu_blocks_override=120,
            kv_transfer_config=transfer,
        )  # fmt: skip
        config, _ = resolve_config(config, platform)
        self.core = build_core(config, platform, PhaseTimer())
        self.counts: Counter[str] = Counter()
        self.num_added = 0

    def answers(self, prompts: Sequence[list[int]], after: int = -1, act: Any = None) -> list[Answer | None]:
        """Of prompts that are asked at once; `act` is called after so many steps. None = it got no answer."""
        handles = {}
        for prompt in prompts:
            request = make_request(self.num_added, prompt, max_tokens=MAX_TOKENS, temperature=1.0, logprobs=3)
            self.core.add_request(dataclasses.replace(request, seed=7))
            handles[self.num_added] = len(handles)
            self.num_added += 1
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs = [b"" for _ in prompts]
        ended, deadline, num_steps = set[int](), time.monotonic() + PATIENCE_S, 0
        while self.core.has_work() and time.monotonic() < deadline:
            if num_steps == after:
                act()
            num_steps += 1
            outputs = self.core.step()
            if outputs is None:
                continue
            self.counts.update(outputs.stats.kv_connector or {})
            for handle, token in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
                tokens[handles[handle]].append(token)
            lines = outputs.logprobs
            for place, values in () if lines is None else zip(lines.index.tolist(), lines.logprobs, strict=True):
                logprobs[handles[int(outputs.handles[place])]] += values.tobytes()
            ended.update(handles[one.handle] for one in outputs.finished)
        self.core.reset_prefix_cache()
        return [(tuple(tokens[i]), logprobs[i]) if i in ended else None for i in range(len(prompts))]


class Check:
    """Answers against those of an engine without a connector."""

    def __init__(self, prompts: list[list[int]]) -> None:
        plain = Engine()
        self.prompts = prompts
        self._expected = [plain.answers([prompt])[0] for prompt in prompts]
        plain.core.shutdown()
        self.num_asked = self.num_wrong = self.num_lost = 0

    def ask(self, engine: Engine, what: str, **options: Any) -> None:
        """All prompts at once, and a line about what came of them."""
        before = Counter(engine.counts)
        for expected, found in zip(self._expected, engine.answers(self.prompts, **options), strict=True):
            self.num_asked += 1
            self.num_lost += found is None
            self.num_wrong += found is not None and found != expected
        counts = ", ".join(f"{name} {number:g}" for name, number in sorted((engine.counts - before).items()))
        print(f"{what}: wrong {self.num_wrong}, lost {self.num_lost}; {counts or 'nothing counted'}", flush=True)


def missing(engine: Engine, name: str, least: int) -> int:
    """1 and a line, if an engine counted too few of something; else 0."""
    if engine.counts[name] >= least:
        return 0
    print(f"{name}: {engine.counts[name]:g}, which should be at least {least}")
    return 1
