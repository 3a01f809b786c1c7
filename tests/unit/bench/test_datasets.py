"""Datasets of benchmarks: what the flags name is read, what is not here says what to do."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import pytest

from quire.bench.datasets import DATASETS, ELSEWHERE, add_dataset_arguments, check_dataset, read_questions
from quire.bench.workload import Question
from quire.errors import QuireClientError


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-prompts", type=int, default=3)
    add_dataset_arguments(parser, input_len=6, output_len=4)
    args = parser.parse_args(flags)
    check_dataset(args)
    return args


def questions(*flags: str, count: int = 4, is_chat: bool = False) -> list[Question]:
    return read_questions(parsed(*flags), count, 0, is_chat=is_chat, vocab_size=300)


def test_flags_have_vllms_names_in_both_forms():
    one = questions("--input-len", "9", "--output-len", "2", "--prefix-len", "3")
    other = questions("--random-input-len", "9", "--random-output-len", "2", "--random-prefix-len", "3")
    assert one == other and all(len(question.prompt) == 12 and question.max_tokens == 2 for question in one)


def test_prefixes_are_repeated_equally_often_and_what_follows_is_not():
    sizes = {"prefix-len": 8, "suffix-len": 2, "num-prefixes": 3, "output-len": 5}
    flags = [text for name, size in sizes.items() for text in (f"--prefix-repetition-{name}", str(size))]
    found = questions("--dataset-name", "prefix_repetition", *flags, count=9)
    assert set(Counter(tuple(one.prompt[:8]) for one in found).values()) == {3}
    assert len({tuple(one.prompt) for one in found}) == 9 and {len(one.prompt) for one in found} == {10}
    assert {one.max_tokens for one in found} == {5}
    chat = questions("--dataset-name", "prefix_repetition", *flags, is_chat=True)
    assert all(len(one.messages[0]["content"].split()) == 10 for one in chat)


def test_files_are_read(tmp_path: Path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "output_tokens": 7}\n{"prompt": [1, 2]}\n')
    flags = ("--dataset-name", "custom", "--dataset-path", str(tmp_path / "prompts.jsonl"))
    found = questions(*flags, count=2)
    assert {(str(one.prompt), one.max_tokens) for one in found} == {("a", 7), ("[1, 2]", 4)}


@pytest.mark.parametrize("name", [*ELSEWHERE, "rondom"])
def test_another_dataset_is_refused_with_what_to_do(name: str):
    with pytest.raises(QuireClientError, match=name) as caught:
        parsed("--dataset-name", name)
    assert caught.value.hint


@pytest.mark.parametrize("flags", [["--dataset-name", DATASETS[-1]], ["--dataset-path", "f"], ["--input-len", "0"]])
def test_what_means_nothing_is_refused(flags: list[str]):
    with pytest.raises(QuireClientError) as caught:
        parsed(*flags)
    assert caught.value.field
