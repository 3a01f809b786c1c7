"""What is recorded is replayed to the same schedule; what differs is named by its step."""

from __future__ import annotations

import dataclasses
import itertools
import json
import stat
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.main import main
from quire.core.drafts import DraftController, DraftProposer
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.scheduler_output import ForcedTokens, SchedulerOutput
from quire.core.stats import SchedulerStats
from quire.errors import ConfigError, ValidationError
from quire.flight_recorder import records, snapshot
from quire.flight_recorder.reader import read_recording
from quire.flight_recorder.recorded_scheduler import RecordedScheduler
from quire.flight_recorder.records import MAGIC, Add, Head, Schedule, Update, frame
from quire.flight_recorder.replay import Replay, ReplayResult
from quire.flight_recorder.restoring import restore
from quire.flight_recorder.writer import RecordWriter
from quire.scheduler.admission import GateDecision
from quire.scheduler.beam_groups import BeamGroups
from quire.scheduler.setup import make_scheduler as make_scheduler_from_setup
from tests.unit.flight_recorder.traces import check_trace
from tests.unit.scheduler import test_properties as properties
from tests.unit.scheduler.harness import FULL, FakeWorker, make_request, make_setup
from tests.unit.scheduler.pretended_model import Guesses
from tests.unit.scheduler.test_draft_tokens import Two
from tests.unit.scheduler.test_properties import (
    Abort,
    Fail,
    Hold,
    Reset,
    Step,
    any_duration,
    any_swap_durations,
    scheduler_settings,
    scripts,
)  # fmt: skip

MIB = 1 << 20
EARLIER_DIGEST = 1622091711
SCARCE: dict[str, Any] = {
    "num_blocks": 14, "block_size": 4, "max_model_len": 40, "max_num_seqs": 4, "budget": 24, "max_decode_slowdown": 2.0,
    "scheduling_policy": "priority",
}  # fmt: skip


class Recorded:
    """A recorded scheduler with a pretended worker."""

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        max_bytes: int = MIB,
        gates: Sequence[Any] = (),
        proposer: DraftProposer | None = None,
        controller: DraftController | None = None,
        **options: Any,
    ) -> None:
        setup = dataclasses.replace(make_setup(**config), has_proposer=proposer is not None)
        ticks = itertools.count()

        def make_writer(clock: Callable[[], float]) -> RecordWriter:
            self.writer = RecordWriter(directory, max_bytes, setup, clock, **options)
            return self.writer

        self.scheduler = RecordedScheduler(setup, make_writer, gates, lambda: next(ticks) / 64, proposer, controller)
        kv_cache = setup.kv_cache
        self.worker = FakeWorker(
            kv_cache.num_blocks, kv_cache.block_size, config.get("groups", (FULL,)), kv_cache.num_swap_blocks
        )
        self.scheduled: list[SchedulerOutput] = []

    def add(self, *requests: EngineCoreRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)

    def step(self, abort_in_flight: Sequence[int] = ()) -> bool:
        step = self.scheduler.schedule()
        if step is None:
            self.scheduler.take_outputs()
            return False
        scheduled = step.output
        self.scheduled.append(scheduled)
        swap_out_s, swap_in_s = any_swap_durations(scheduled)
        output = dataclasses.replace(self.worker.execute(scheduled), swap_out_s=swap_out_s, swap_in_s=swap_in_s)
        if abort_in_flight:
            self.scheduler.finish_requests(abort_in_flight, FinishReason.ABORT)
        self.scheduler.update_from_output(step, output, any_duration(scheduled))
        return True

    def fail_step(self) -> None:
        step = self.scheduler.schedule()
        if step is not None:
            self.scheduled.append(step.output)
            self.worker.spoil(step.output)
            self.scheduler.abandon_step(step)

    def run(self) -> None:
        while self.scheduler.has_unfinished_requests():
            self.step()

    def begin_file(self) -> None:
        """A new file begins here, whatever runs."""
        self.writer.begin_file(snapshot.freeze(self.scheduler._scheduler))

    def close(self) -> None:
        self.scheduler.close()


def record_some(directory: Path, **options: Any) -> Recorded:
    """Prompts that share beginnings, priorities, an abort, blocks for half of them."""
    recorded = Recorded(directory, SCARCE, **options)
    for handle in range(12):
        prompt = [3, 1, 4, 1, 5, 9, 2, 6, handle] * (1 + handle % 3)
        recorded.add(make_request(handle, prompt[:25], max_tokens=9, priority=-(handle % 2), ignore_eos=handle % 3 > 0))
        recorded.step(abort_in_flight=(2,) if handle == 5 else ())
    recorded.run()
    recorded.close()
    return recorded


def replay(path: Path) -> ReplayResult:
    return Replay(read_recording(path)).run()


@settings(max_examples=properties.EXAMPLES // 2, deadline=None)
@given(scheduler_settings(), scripts(), st.lists(st.integers(0, 40), max_size=3), st.sampled_from([None, Guesses()]))
def test_any_recording_replays_to_the_same_schedule_from_any_of_its_files(
    tmp_path_factory, config, script, places, proposer
):
    directory = tmp_path_factory.mktemp("recording")
    recorded = Recorded(directory, config, proposer=proposer)
    for number, action in enumerate(script):
        if number in places:
            recorded.begin_file()
        if isinstance(action, Step):
            recorded.step(action.abort_in_flight)
        elif isinstance(action, Abort):
            recorded.scheduler.finish_requests([action.handle], FinishReason.ABORT)
        elif isinstance(action, Hold):
            recorded.scheduler.hold(action.handles)
        elif isinstance(action, Fail):
            recorded.fail_step()
        elif isinstance(action, Reset):
            recorded.scheduler.reset_prefix_cache(action.with_running)
        else:
            try:
                recorded.add(action.request)
            except ValidationError as error:
                assert error.hint
    recorded.scheduler.hold(())
    recorded.run()
    recorded.close()
    whole = replay(directory)
    assert whole.first_difference is None
    assert whole.num_steps == len(recorded.scheduled)
    for file in sorted(directory.iterdir())[1:]:
        assert replay(file).first_difference is None


def test_a_recording_of_two_steps_in_flight_and_of_drafts_replays(tmp_path):
    recorded = Recorded(tmp_path, {**SCARCE, "max_steps_in_flight": 2}, proposer=Guesses())
    recorded.add(*(make_request(handle, 20 - handle, max_tokens=9) for handle in range(6)))
    in_flight: deque[Any] = deque()
    while recorded.scheduler.has_unfinished_requests() or in_flight:
        step = recorded.scheduler.schedule()
        if step is not None:
            recorded.scheduled.append(step.output)
            in_flight.append((step, recorded.worker.execute(step.output)))
        if len(in_flight) == 2 or step is None:
            recorded.scheduler.update_from_output(*in_flight.popleft())
    recorded.close()
    result = replay(tmp_path)
    assert result.first_difference is None and result.num_steps == len(recorded.scheduled)


class OnAndOff(Two):
    """Closes every other time that it is asked, for three steps."""

    num_asked = 0

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        self.num_asked += 1
        return 3 * (self.num_asked % 2)

    def num_skipped(self) -> int:
        return 0 if self.num_asked % 2 else 3


def test_what_a_controller_chose_is_replayed_without_it_from_any_file_and_summed_up(tmp_path, capsys):
    recorded = Recorded(tmp_path, SCARCE, proposer=Guesses(4, 1), controller=OnAndOff())
    recorded.add(*(make_request(handle, 5, max_tokens=30) for handle in range(2)))
    for _ in range(14):
        recorded.step()
        recorded.begin_file()
    recorded.run()
    recorded.close()
    counts = [0 if one.drafts is None else int(one.drafts.counts.sum()) for one in recorded.scheduled]
    assert 0 in counts[1:12] and max(counts) > 1
    assert replay(tmp_path).num_steps == len(recorded.scheduled)
    assert all(replay(file).first_difference is None for file in (tmp_path, *tmp_path.iterdir()))
    assert main(["replay", str(tmp_path)]) == 0
    assert f"draft tokens: {sum(counts)} verified, " in capsys.readouterr().out
    assert main(["replay", str(tmp_path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["summary"]
    assert summary["draft_tokens"] == sum(counts) >= summary["accepted_draft_tokens"] > 0


def test_a_recording_holds_preemptions_aborts_priorities_and_prefix_hits(tmp_path):
    recorded = record_some(tmp_path)
    result = replay(tmp_path)
    assert result.first_difference is None and result.num_steps == len(recorded.scheduled)
    assert result.watch.num_preemptions > 0 and result.watch.num_prefix_hits > 0
    assert {one.finish_reason for one in result.watch.timelines.values()} >= {"abort", "length"}


def rewrite(path: Path, change: Callable[[int, Any], Any]) -> None:
    """Change records, with right checksums."""
    head, calls = read_recording(path).head, list(read_recording(path).calls())
    frames = [frame(change(number, call)) for number, call in enumerate(calls)]
    path.write_bytes(MAGIC + frame(head) + b"".join(frames))


@pytest.mark.parametrize("step", [0, 3, 11])
def test_another_sampled_token_is_named_by_its_step(tmp_path, step):
    record_some(tmp_path)
    [path] = tmp_path.iterdir()
    updates = [n for n, call in enumerate(read_recording(path).calls()) if isinstance(call, Update)]
    calls = list(read_recording(path).calls())
    target = next(n for n in updates[step:] if len(calls[n].token_ids))
    expected = updates.index(target) + 1

    def change(number: int, call: Any) -> Any:
        if number != target:
            return call
        tokens = np.array(call.token_ids)
        tokens[0] += 1
        return msgspec.structs.replace(call, token_ids=tokens)

    rewrite(path, change)
    result = replay(path)
    assert result.first_difference is not None
    assert result.first_difference[0] == expected and "tokens" in result.first_difference[1]


def test_another_reading_of_the_clock_is_named_by_its_step(tmp_path):
    record_some(tmp_path)
    [path] = tmp_path.iterdir()
    updates = [n for n, call in enumerate(read_recording(path).calls()) if isinstance(call, Update)]

    def change(number: int, call: Any) -> Any:
        return msgspec.structs.replace(call, clock=[*call.clock[:-1], 77.0]) if number == updates[6] else call

    rewrite(path, change)
    result = replay(path)
    assert result.first_difference is not None and result.first_difference[0] == 7


def test_another_decision_is_named_with_what_was_recorded(tmp_path, capsys):
    record_some(tmp_path)
    [path] = tmp_path.iterdir()
    plans = [n for n, call in enumerate(read_recording(path).calls()) if isinstance(call, Schedule)]

    def change(number: int, call: Any) -> Any:
        return (
            msgspec.structs.replace(call, rows=np.array([9], np.int32), num_tokens=None) if number == plans[2] else call
        )

    rewrite(path, change)
    assert main(["replay", str(path)]) == 1
    out = capsys.readouterr().out
    assert "the schedule differs at step 2: rows [9] were recorded" in out


def test_a_file_cut_off_anywhere_is_read_up_to_the_tear(tmp_path):
    record_some(tmp_path)
    [path] = tmp_path.iterdir()
    data = path.read_bytes()
    num_steps = replay(path).num_steps
    for end in (len(data) - 1, len(data) * 2 // 3, len(data) // 2):
        path.write_bytes(data[:end])
        recording = read_recording(path)
        result = Replay(recording).run()
        assert result.first_difference is None and 0 < result.num_steps <= num_steps
        assert "cut off" in recording.torn[path]
    damaged = bytearray(data)
    damaged[len(data) // 2] ^= 1
    path.write_bytes(damaged)
    recording = read_recording(path)
    assert Replay(recording).run().first_difference is None
    assert recording.torn


def test_the_ring_keeps_its_size_and_the_files_that_are_left_replay(tmp_path):
    recorded = Recorded(tmp_path, {**SCARCE, "max_decode_slowdown": None}, max_bytes=128 * 1024)
    for handle in range(400):
        recorded.add(make_request(handle, 20 + handle % 7, max_tokens=4))
        recorded.step()
        recorded.step()
        recorded.writer.flush()
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 128 * 1024
    recorded.run()
    recorded.close()
    recording = read_recording(tmp_path)
    assert recording.head.number > 0, "the first files are gone"
    assert recording.head.state is not None
    result = Replay(recording).run()
    assert result.first_difference is None and result.num_steps > 50


def test_a_writer_that_falls_behind_drops_whole_files_and_says_so(tmp_path, caplog):
    recorded = Recorded(tmp_path, SCARCE, max_queued=40)
    with recorded.writer._lock:  # the thread is held up
        for handle in range(60):
            recorded.add(make_request(handle, 5))
            recorded.step()
        assert "flight recorder paused" in caplog.text
    recorded.writer.flush()
    recorded.writer.needs_state = True
    recorded.step()
    assert "records are missing" in caplog.text
    recorded.run()
    recorded.close()
    first, second = sorted(tmp_path.iterdir())
    assert not read_recording(second).head.follows
    assert read_recording(tmp_path).files == [second]
    for path in (first, second):
        assert replay(path).first_difference is None


def test_files_are_for_their_owner_and_hold_no_texts(tmp_path):
    recorded = Recorded(tmp_path, SCARCE)
    recorded.add(make_request(0, 5, stop=["a secret text"], bad_words=["another"]))
    recorded.begin_file()
    recorded.run()
    recorded.close()
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        head = read_recording(path).head
        assert b"secret" not in path.read_bytes() and b"another" not in path.read_bytes()
        assert head.state is None or replay(path).first_difference is None


def test_gates_outside_the_scheduler_are_replayed_by_what_they_said(tmp_path):
    verdicts = itertools.cycle([GateDecision.SKIP, GateDecision.GO, GateDecision.STOP, GateDecision.GO])
    recorded = Recorded(tmp_path, SCARCE, gates=(lambda candidate, plan: next(verdicts),))
    recorded.add(*[make_request(handle, 5) for handle in range(10)])
    recorded.run()
    recorded.close()
    result = replay(tmp_path)
    assert result.first_difference is None and result.num_steps == len(recorded.scheduled)


def test_a_failed_step_is_replayed(tmp_path):
    recorded = Recorded(tmp_path, SCARCE)
    recorded.add(*[make_request(handle, 5) for handle in range(3)])
    recorded.step()
    failed = recorded.scheduler.schedule()
    assert failed is not None
    recorded.scheduler.abandon_step(failed)
    recorded.scheduler.take_outputs()
    recorded.scheduler.finish_requests([1], FinishReason.ERROR, "it failed alone")
    recorded.worker.rows.clear()
    step = recorded.scheduler.schedule()
    assert step is not None
    scheduled = step.output
    output = records.ModelRunnerOutput(
        rows=scheduled.rows[scheduled.is_sampling],
        sampled_token_ids=np.full(int(scheduled.is_sampling.sum()), 8, np.int32),
        errors={int(scheduled.rows[0]): "NaN"},
    )
    recorded.scheduler.update_from_output(step, output, 0.5)
    recorded.close()
    result = replay(tmp_path)
    assert result.first_difference is None and result.num_steps == 3
    assert {one.finish_reason for one in result.watch.timelines.values()} >= {"error"}


def test_a_replay_says_why_a_request_waited(tmp_path, capsys):
    config = {**SCARCE, "num_blocks": 40, "max_num_seqs": 2, "budget": 64, "scheduling_policy": "fcfs"}
    recorded = Recorded(tmp_path, config)
    recorded.add(*[make_request(handle, 9, max_tokens=6) for handle in range(4)])
    recorded.run()
    recorded.close()
    check_trace(tmp_path, tmp_path.parent / "trace.json")
    capsys.readouterr()
    assert main(["replay", str(tmp_path), "--request", "r3"]) == 0
    out = capsys.readouterr().out
    assert "identical schedule" in out
    assert "max_num_seqs reached, behind r2" in out
    assert main(["replay", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["identical"] and report["summary"]["requests"] == 4
    assert set(report["summary"]["waited_s_by_reason"]) == {
        "arrived during a step", "max_num_seqs reached",
    }  # fmt: skip
    third = next(one for one in report["longest_waits"] if one["request_id"] == "r3")
    waited = sum(span["seconds"] for span in third["spans"] if "max_num_seqs" in span["reason"])
    assert waited == pytest.approx(third["waited_s"], abs=0.2) and waited > 0


def test_pages_that_are_short_are_counted_and_preemptions_have_a_cause(tmp_path, capsys):
    recorded = Recorded(tmp_path, {**SCARCE, "scheduling_policy": "fcfs", "max_num_seqs": 8})
    recorded.add(*[make_request(handle, 17, max_tokens=20) for handle in range(6)])
    recorded.run()
    recorded.close()
    watch = replay(tmp_path).watch
    spans = [span for one in watch.timelines.values() for span in one.spans]
    assert any(span.reason == "not enough free KV blocks" and span.num_missing > 0 for span in spans)
    causes = {cause for one in watch.timelines.values() for _, cause in one.preempted}
    assert causes == {"not enough KV blocks for requests of higher rank"}


def test_an_urgent_request_is_named_as_the_cause(tmp_path):
    recorded = Recorded(tmp_path, {**SCARCE, "num_blocks": 40, "max_num_seqs": 1})
    recorded.add(make_request(0, 5, max_tokens=20))
    recorded.step()
    recorded.add(make_request(1, 5, priority=-3))
    recorded.run()
    recorded.close()
    [(_, cause)] = replay(tmp_path).watch.timelines[0].preempted
    assert cause == "preempted for r1 of a higher class"


def test_an_unknown_part_of_the_state_stops_the_recorder_with_its_path(tmp_path, caplog):
    recorded = Recorded(tmp_path, SCARCE)
    recorded.scheduler._scheduler._order.queue.surprise = complex(1, 2)  # type: ignore[attr-defined]
    recorded.writer.needs_state = True
    recorded.add(make_request(0, 5))
    recorded.step()
    assert "Scheduler._order.queue.surprise is a builtins.complex" in caplog.text
    recorded.run()
    recorded.close()


def test_the_digest_of_what_is_told_is_that_of_earlier_recordings_whatever_statistics_are_added():
    outputs = EngineCoreOutputs(
        handles=np.array([3, 4], np.int64), new_token_ids=np.array([7, 9], np.int32), logprobs=None, prompt_logprobs={},
        finished=(), events=(), timestamp=2.5, stats=SchedulerStats(num_running=2, num_scheduled_tokens=5),
    )  # fmt: skip
    assert records.digest_of_outputs(outputs) == EARLIER_DIGEST


def beam_groups() -> BeamGroups:
    groups = make_scheduler_from_setup(make_setup(**SCARCE))._groups._groups
    return next(group for group in groups if isinstance(group, BeamGroups))


def test_the_tokens_that_beams_chose_and_the_worker_has_not_been_sent_are_part_of_a_state():
    beams = beam_groups()
    ids = np.array([1], np.int32)
    beams._chosen.append(ForcedTokens(ids, ids, ids))
    copy = beam_groups()
    restore(copy, snapshot.encode(snapshot.freeze(beams)))
    assert copy._chosen[0].token_ids.tolist() == [1]


def test_foreign_files_are_refused_by_name(tmp_path):
    path = tmp_path / "x.qfr"
    path.write_bytes(b"something else")
    with pytest.raises(ValidationError, match="it has another type"):
        read_recording(path)
    head = Head(99, "9.9", "run", 0, 0.0, 0.0, make_setup(), False)
    path.write_bytes(MAGIC + frame(head))
    with pytest.raises(ValidationError, match=r"version 99[\s\S]*use Quire 9\.9"):
        read_recording(path)
    with pytest.raises(ConfigError, match="is not a recording"):
        read_recording(tmp_path / "missing")
    state = snapshot.encode(["object", 0, "os:system", {}])
    path.write_bytes(MAGIC + frame(Head(records.VERSION, "0", "run", 0, 0.0, 0.0, make_setup(), False, state)))
    assert main(["replay", str(path)]) == 2


def test_a_refused_request_is_refused_again(tmp_path):
    recorded = Recorded(tmp_path, SCARCE)
    with pytest.raises(ValidationError):
        recorded.add(make_request(0, 60))
    recorded.add(make_request(1, 5))
    recorded.run()
    recorded.close()
    assert isinstance(next(iter(read_recording(tmp_path).calls())), Add)
    assert replay(tmp_path).first_difference is None
