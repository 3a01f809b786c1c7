"""What arrives: requests with their times, lengths and shared beginnings, made up or read from a trace.

Tokens are not stored but computed: the token at a position is a function of the request's stream and the position, so a
million prompts take no memory, and the next turn of a conversation begins with exactly what the last one put out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError, ValidationError
from quire.utils.checks import shown

VOCAB_SIZE = 30_000
FIRST_TOKEN = 100
MAX_TRACE_BYTES = 1 << 31
# Odd 64-bit numbers with no pattern in their bits; the last two mix as in Steele et al. 2014 (SplitMix64), figure 11.
_STREAM, _POSITION = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
_MIX, _MORE = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest:
    """One request.

    Attributes:
        arrival_s: seconds from the start, when the client sends it.
        stream: requests of one stream (a conversation) have the same tokens at the same positions.
        prefix, prefix_len: the first tokens are those of this stream instead, which several streams share.
        token_ids: the prompt, where it is known; else it follows from the streams.
        priority: lower first.
    """

    arrival_s: float
    prompt_len: int
    output_len: int
    stream: int
    prefix: int = 0
    prefix_len: int = 0
    token_ids: np.ndarray | None = None
    priority: int = 0

    def prompt(self) -> np.ndarray:
        """[prompt_len] int32."""
        if self.token_ids is not None:
            return self.token_ids
        tokens = stream_tokens(self.stream, np.arange(self.prompt_len))
        tokens[: self.prefix_len] = stream_tokens(-1 - self.prefix, np.arange(min(self.prefix_len, self.prompt_len)))
        return tokens


def stream_tokens(stream: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
    """int32 tokens of streams at positions."""
    keys = np.atleast_1d(np.asarray(stream, np.int64)).astype(np.uint64)
    mixed = keys * _STREAM + np.asarray(positions, np.int64).astype(np.uint64) * _POSITION
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MORE
    tokens: np.ndarray = (mixed >> np.uint64(33)).astype(np.int64) % (VOCAB_SIZE - FIRST_TOKEN) + FIRST_TOKEN
    return tokens.astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in tokens: uniform within a share of the mean, or log-normal with a given spread.

    Attributes:
        spread: half width as a share of the mean (uniform), or standard deviation of the logarithm (log-normal).
    """

    mean: int
    spread: float = 0.0
    is_lognormal: bool = False

    def draw(self, rng: np.random.Generator, count: int, most: int) -> np.ndarray:
        """[count] lengths between 1 and `most`."""
        if self.is_lognormal:
            drawn = rng.lognormal(np.log(self.mean) - self.spread**2 / 2, self.spread, count)
        else:
            drawn = rng.uniform(self.mean * (1 - self.spread), self.mean * (1 + self.spread), count)
        return np.clip(np.rint(drawn), 1, most).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticLoad:
    """A load to make up.

    Attributes:
        num_requests: in all, turns counted one by one.
        rate: arrivals per second (of first turns scaled so that all turns together come at this rate).
        burstiness: shape of the gamma distribution of gaps: 1 = a Poisson process, less = more bursty.
        turns: of each conversation; a later turn holds the whole conversation so far, and comes `think_s` after it
            could have been answered at `assumed_token_s` a token.
        num_prefixes, prefix_len: system prompts shared by conversations, and their tokens (beside `prompts`).
        max_model_len: prompt and output are cut to it.
    """

    num_requests: int
    rate: float
    prompts: Lengths
    outputs: Lengths
    burstiness: float = 1.0
    turns: int = 1
    think_s: float = 5.0
    assumed_token_s: float = 0.03
    num_prefixes: int = 1
    prefix_len: int = 0
    max_model_len: int = 1 << 20
    seed: int = 0

    def make(self) -> list[SimRequest]:
        """The requests by arrival; the same settings make the same ones."""
        rng = np.random.default_rng(self.seed)
        num_streams = -(-self.num_requests // self.turns)
        gaps = rng.gamma(self.burstiness, 1 / self.burstiness, num_streams)
        starts = np.cumsum(gaps) * (self.turns / self.rate)
        most = self.max_model_len - 1 - self.prefix_len
        if most < 2:
            raise ValidationError(
                f"prefix_len={self.prefix_len} leaves no room in max_model_len={self.max_model_len}",
                hint="shorten the shared prefix",
                field="prefix_len",
            )
        prompts = self.prompts.draw(rng, num_streams * self.turns, most)
        outputs = self.outputs.draw(rng, num_streams * self.turns, most)
        prefixes = rng.integers(0, self.num_prefixes, num_streams)
        requests: list[SimRequest] = []
        for stream in range(num_streams):
            time_s, length = float(starts[stream]), self.prefix_len
            for turn in range(self.turns):
                place = stream * self.turns + turn
                length += int(prompts[place])
                if len(requests) == self.num_requests or length >= self.max_model_len:
                    break
                output_len = min(int(outputs[place]), self.max_model_len - length)
                requests.append(
                    SimRequest(
                        arrival_s=time_s, prompt_len=length, output_len=output_len, stream=stream,
                        prefix=int(prefixes[stream]), prefix_len=self.prefix_len,
                    )
                )  # fmt: skip
                length += output_len
                time_s += output_len * self.assumed_token_s + self.think_s
        return sorted(requests, key=lambda one: one.arrival_s)


def read_trace(path: Path) -> list[SimRequest]:
    """Requests of a JSONL file by arrival.

    A line: `arrival_s`, `prompt_tokens` (a number, or token ids) and `output_tokens`; optionally `session` (lines of
    one session share their tokens position by position) and `priority`.

    Raises:
        ConfigError: the file cannot be read.
        ValidationError: a line is malformed; names it.
    """
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise ConfigError(f"{path} is larger than 2 GiB", hint="use a part of it", field="trace")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}", hint="check the path", field="trace") from None
    sessions: dict[str, int] = {}
    requests = [_parse(f"{path}, line {n}", text, n, sessions) for n, text in enumerate(lines, 1) if text.strip()]
    if not requests:
        raise ValidationError(f"{path} holds no requests", field="trace")
    return sorted(requests, key=lambda one: one.arrival_s)


def _parse(where: str, text: str, number: int, sessions: dict[str, int]) -> SimRequest:
    try:
        line: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"{where} is not JSON: {error}", field="trace") from None
    if not isinstance(line, dict):
        raise ValidationError(f"{where} is {shown(line)}", hint='write {"arrival_s": ...}', field="trace")
    prompt, session = line.get("prompt_tokens"), line.get("session")
    token_ids = None
    if isinstance(prompt, list) and all(type(one) is int and 0 <= one < 1 << 31 for one in prompt):
        token_ids = np.array(prompt, dtype=np.int32)
        prompt = len(prompt)
    stream = number if session is None else sessions.setdefault(str(session), 1_000_000_000 + len(sessions))
    return SimRequest(
        arrival_s=_number(where, line, "arrival_s", 0.0),
        prompt_len=int(_number(where, {"prompt_tokens": prompt}, "prompt_tokens", 1)),
        output_len=int(_number(where, line, "output_tokens", 1)),
        stream=stream, token_ids=token_ids,
        priority=int(_number(where, {"priority": 0, **line}, "priority", -(1 << 22))),
    )  # fmt: skip


def _number(where: str, line: dict[str, Any], name: str, least: float) -> float:
    value: Any = line.get(name)
    if type(value) not in (int, float) or not least <= value < 1e12:
        raise ValidationError(
            f"{where}: {name} is {shown(value)}", hint=f"a number of at least {least:g}", field="trace"
        )
    return float(value)


def scaled(requests: Sequence[SimRequest], factor: float) -> list[SimRequest]:
    """The same requests, arriving `factor` times as fast."""
    return [dataclasses.replace(one, arrival_s=one.arrival_s / factor) for one in requests]
