"""Tests of the corpus: same seed, same text; the split is clean; checkers are strict."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest

from training.corpus.base import held_out, is_right, sum_key
from training.corpus.registry import EVALUATED, MEASURED, TASKS, held_out_samples, training_samples
from training.floors import ASKED, CARD, shortfalls
from training.mixture import CYCLE_SHARES, CYCLES, FIRST_CYCLE, HEADS, PHASES, overall


def _take(seed: int, count: int):
    return list(itertools.islice(training_samples(seed, overall(PHASES)), count))


def test_generator_is_deterministic():
    assert _take(3, 300) == _take(3, 300)
    assert _take(3, 300) != _take(4, 300)
    assert held_out_samples("sums", 20) == held_out_samples("sums", 20)


def test_every_task_occurs():
    assert {s.task for s in _take(5, 4000)} == set(TASKS)


def test_the_schedule_is_whole_and_names_tasks_that_exist():
    assert sum(phase.share for phase in FIRST_CYCLE) == pytest.approx(1.0) and PHASES[: len(FIRST_CYCLE)] == FIRST_CYCLE
    assert set(CYCLES) <= set(range(len(PHASES))) and 0 in CYCLES
    assert len(CYCLE_SHARES) == len(CYCLES) and sum(CYCLE_SHARES) == pytest.approx(1.0)
    for phase in (*PHASES, HEADS):
        assert set(phase.weights) <= set(TASKS) and min(phase.weights.values()) > 0
    assert sum(overall(PHASES).values()) == pytest.approx(1.0)


def test_a_count_is_written_step_by_step():
    for sample in held_out_samples("counting", 50):
        steps, total = sample.answer.rsplit(": ", 1)
        value = int(total.split()[0])
        assert [int(n) for n in re.findall(r"\d+", steps)] == list(range(1, value + 1))
        assert is_right(sample.answer, sample.check) and not is_right(f"{value + 1} items.", sample.check)


def test_owners_are_looked_up_backwards():
    rng = random.Random(0)
    forms = set()
    for _ in range(100):
        sample = TASKS["owners"](rng, False)
        shown = sample.messages[0]["content"]
        question = sample.messages[-1]["content"]
        if len(sample.messages) > 1 or "Who " in question:
            forms.add("sentences")
            assert sample.answer in shown and re.search(r"the (.*)\?$", question).group(1) in sample.answer
        else:
            forms.add("words")
            for thing, owner in (pair.split(": ") for pair in sample.answer.split(", ")):
                assert re.search(rf"{owner}\W+(\w+ the )?{thing}\b", shown) and thing in question
    assert forms == {"sentences", "words"}


def test_scores_below_the_card_are_named():
    good = {task: {"accuracy": 1.0, "ended": 1.0} for task in {**CARD, **ASKED}}
    assert shortfalls(500, good) == []
    bad = {**good, "sorting": {"accuracy": 0.79, "ended": 1.0}, "sums": {"accuracy": 1.0, "ended": 0.9}}
    del bad["tales"]
    missed = shortfalls(500, bad)
    assert len(missed) == 3 and all(any(m.startswith(t) for m in missed) for t in ("sorting", "sums", "tales"))


@pytest.mark.parametrize("task", EVALUATED)
def test_held_out_prompts_never_train(task):
    keys = {k for s in held_out_samples(task, 100) for k in s.keys}
    assert keys and all(held_out(k) for k in keys)


def test_training_never_shows_a_held_out_key():
    for sample in _take(6, 3000):
        assert not any(held_out(k) for k in sample.keys)


def test_no_held_out_sum_in_any_training_text():
    """Looks at the text itself: neither a + b nor c - a of a held-out pair is there."""
    for sample in _take(7, 6000):
        text = " ".join([m["content"] for m in sample.messages] + [sample.answer])
        for a, op, b in re.findall(r"(?<!\d)(\d\d) ?([+-]) ?(\d\d)(?!\d)", text):
            x, y = int(a), int(b)
            pair = (x, y) if op == "+" else (y, x - y)
            if min(pair) > 9 and (op == "+" or sample.task == "differences"):
                assert not held_out(sum_key(*pair)), text


@pytest.mark.parametrize("task", EVALUATED)
def test_checkers_accept_the_answer_and_reject_others(task):
    samples = held_out_samples(task, 60)
    for sample in samples:
        assert is_right(sample.answer, sample.check), sample
        assert not is_right("", sample.check)
    if task in MEASURED:
        others = [s.answer for s in samples[1:]] + [samples[0].answer]
        wrong = sum(is_right(o, s.check) for s, o in zip(samples, others))
        assert wrong <= 6  # a few answers are the same by chance


def test_checkers_reject_near_misses():
    assert is_right("12 + 34 = 46", {"kind": "number", "value": 46})
    assert not is_right("12 + 34 = 47", {"kind": "number", "value": 46})
    story = {"kind": "text", "must": ["red kite"], "no": ["blue box"]}
    assert is_right("Mia found a red kite.", story)
    assert not is_right("Mia found a blue box and a red kite.", story)
    assert not is_right("Mia found a red kitew.", story)
    value = {"name": "Anna", "age": 3}
    assert is_right(json.dumps(value), {"kind": "json", "value": value})
    assert not is_right('{"name": "Anna", "age": "3"}', {"kind": "json", "value": value})
    assert not is_right('{"name": "Anna", "age": 3} ok', {"kind": "json", "value": value})
    call = {"name": "f", "arguments": {"a": 1}}
    block = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    check = {"kind": "tools", "calls": [call]}
    assert is_right(block, check)
    assert not is_right(block + "\n" + block, check)
    assert not is_right("Sure! " + block, check)
    assert not is_right(block.replace("1", "2"), check)
    thought = {"kind": "number", "value": 4, "thought": True}
    assert is_right("<think>\n2 + 2\n</think>\n\n4", thought)
    assert not is_right("4", thought)
