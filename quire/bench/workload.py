"""What is asked: prompts of random tokens or of a file, and when each is sent.

Called by the command. No state; the same seed makes the same workload.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.bench.records import Job
from quire.errors import ConfigError, ValidationError
from quire.utils.checks import shown

# Below, most vocabularies have their control tokens; every vocabulary in use has a thousand tokens.
FIRST_TOKEN_ID, DEFAULT_VOCAB_SIZE = 100, 1000
WORDS = (
    "time year way day man thing life child world school state family hand part place case week company system group "
    "number fact home water room mother area money story month lot right book eye job word side kind head house"
)
MAX_FILE_BYTES = 1 << 30
OWN_FIELDS = frozenset(("stream", "n", "best_of", "prompt", "messages"))


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt (text or token ids) or a conversation, and the most tokens of its answer."""

    prompt: str | list[int] | None
    messages: list[Any] | None
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Sizes of random requests, in tokens.

    Attributes:
        range_ratio: lengths are uniform within this share above and below.
        prefix_len: tokens that all prompts begin with, beside `input_len`.
        vocab_size: token ids are below it.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    vocab_size: int = DEFAULT_VOCAB_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedPrefixes:
    """Sizes of random requests that share `num_prefixes` prefixes, in tokens."""

    prefix_len: int
    suffix_len: int
    num_prefixes: int
    output_len: int
    vocab_size: int = DEFAULT_VOCAB_SIZE


def random_questions(count: int, lengths: RandomLengths, seed: int, *, is_chat: bool) -> list[Question]:
    """Requests of random tokens; for a chat, of random words, about one token each."""
    rng = np.random.default_rng([seed, 1])
    prefix = rng.integers(FIRST_TOKEN_ID, lengths.vocab_size, size=lengths.prefix_len).tolist()
    questions = []
    for input_len, output_len in zip(
        _lengths(rng, lengths.input_len, lengths.range_ratio, count),
        _lengths(rng, lengths.output_len, lengths.range_ratio, count),
        strict=True,
    ):
        ids = prefix + rng.integers(FIRST_TOKEN_ID, lengths.vocab_size, size=input_len).tolist()
        questions.append(_random_question(ids, output_len, is_chat=is_chat))
    return questions


def repeated_prefix_questions(count: int, prefixes: RepeatedPrefixes, seed: int, *, is_chat: bool) -> list[Question]:
    """Requests of random tokens or words that begin with one of several prefixes, in random order."""
    rng = np.random.default_rng([seed, 1])
    size = (prefixes.num_prefixes, prefixes.prefix_len)
    starts = rng.integers(FIRST_TOKEN_ID, prefixes.vocab_size, size=size).tolist()
    questions = []
    for which in rng.permutation(np.arange(count) % prefixes.num_prefixes).tolist():
        suffix = rng.integers(FIRST_TOKEN_ID, prefixes.vocab_size, size=prefixes.suffix_len).tolist()
        questions.append(_random_question(starts[which] + suffix, prefixes.output_len, is_chat=is_chat))
    return questions


def _random_question(ids: list[int], output_len: int, *, is_chat: bool) -> Question:
    if not is_chat:
        return Question(ids, None, output_len)
    words = WORDS.split()
    text = " ".join(words[one % len(words)] for one in ids)
    return Question(None, [{"role": "user", "content": text}], output_len)


def _lengths(rng: np.random.Generator, mean: int, ratio: float, count: int) -> list[int]:
    low, high = max(1, int(mean * (1 - ratio))), max(1, int(mean * (1 + ratio)))
    lengths: list[int] = rng.integers(low, high, size=count, endpoint=True).tolist()
    return lengths


def file_questions(kind: str, path: str, count: int, output_len: int, seed: int, *, is_chat: bool) -> list[Question]:
    """The first `count` requests of a file, in an order that the seed decides.

    Args:
        kind: "custom": JSON lines with `prompt` (text or token ids) or `messages`, and optionally `output_tokens`;
            "sharegpt": a JSON list of records with `conversations`, whose first turn is asked.
        output_len: most tokens of answers that the file does not say it of.

    Raises:
        ConfigError: the file cannot be read.
        ValidationError: a record is malformed, or there are too few.
    """
    records = _read_records(kind, path)
    if len(records) < count:
        raise ValidationError(
            f"{path} has {len(records)} requests, but {count} are needed (warm-up included)",
            hint=f"use --num-prompts {len(records)} or fewer; repeated prompts would hit the prefix cache",
            field="num_prompts",
        )
    order = np.random.default_rng([seed, 1]).permutation(len(records))[:count]
    return [_question(path, records[number], output_len, is_chat=is_chat) for number in order.tolist()]


def _read_records(kind: str, path: str) -> list[tuple[int, dict[str, Any]]]:
    """(number in the file, record) of each."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than 1 GiB", hint="use a part of it", field="dataset_path")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{path} cannot be read: {reason}", hint="check the path", field="dataset_path") from None
    try:
        if kind == "custom":
            values = [(n, json.loads(line)) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        else:
            values = [(n, _first_turn(record)) for n, record in enumerate(json.loads(text), 1)]
    except (ValueError, TypeError, RecursionError) as error:
        expected = "JSON lines" if kind == "custom" else "a JSON list"
        raise ValidationError(f"{path} is not {expected}: {error}", field="dataset_path") from None
    return [(number, value) for number, value in values if value is not None]


def _first_turn(record: Any) -> dict[str, Any] | None:
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return None  # not a conversation
    return {"prompt": turns[0].get("value")}


def _question(path: str, numbered: tuple[int, dict[str, Any]], output_len: int, *, is_chat: bool) -> Question:
    number, record = numbered
    where = f"{path}, record {number}"
    if not isinstance(record, dict):
        raise ValidationError(f"{where} is {shown(record)}", hint='write {"prompt": ...}', field="dataset_path")
    prompt, messages = record.get("prompt"), record.get("messages")
    max_tokens = record.get("output_tokens", output_len)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ValidationError(f"{where}: output_tokens is {shown(max_tokens)}", hint="at least 1", field="dataset_path")
    if is_chat:
        if messages is None and isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        if not isinstance(messages, list) or not messages:
            raise ValidationError(f"{where} has neither messages nor text", field="dataset_path")
        return Question(None, messages, max_tokens)
    is_ids = isinstance(prompt, list) and all(type(one) is int for one in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ValidationError(
            f"{where} has no prompt", hint="use text or token ids; conversations need --endpoint /v1/chat/completions",
            field="dataset_path",
        )  # fmt: skip
    return Question(prompt, None, max_tokens)


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent.

    Gaps are drawn from a gamma distribution with mean 1 / rate and shape `burstiness` (1 = a Poisson process, less =
    more bursty, much more = even), and scaled so that `count` requests take exactly count / rate.

    Args:
        rate: requests per second; infinity = all at once.
    """
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng([seed, 2]).gamma(burstiness, 1 / (rate * burstiness), size=count)
    ends = np.cumsum(gaps)
    scaled: list[float] = (ends * (count / rate) / ends[-1]).tolist()
    return [0.0, *scaled[:-1]]


def make_jobs(
    questions: list[Question], due_s: list[float], *, model: str, is_chat: bool, fields: Mapping[str, Any]
) -> list[Job]:
    """The requests as they are sent, streaming, with usage at the end.

    Args:
        fields: further ones of every body; they win over `max_tokens` and `stream_options`.

    Raises:
        ValidationError: `fields` holds one that the measurement rests on.
    """
    if taken := sorted(OWN_FIELDS & fields.keys()):
        raise ValidationError(
            f"extra body field {taken[0]} is set by the benchmark itself", hint="leave it out", field="extra_body"
        )
    jobs = []
    for index, (question, due) in enumerate(zip(questions, due_s, strict=True)):
        content = {"messages": question.messages} if is_chat else {"prompt": question.prompt}
        body = {
            "model": model, **content, "max_tokens": question.max_tokens,
            "stream": True, "stream_options": {"include_usage": True}, **fields,
        }  # fmt: skip
        jobs.append(Job(index, due, json.dumps(body)))
    return jobs
