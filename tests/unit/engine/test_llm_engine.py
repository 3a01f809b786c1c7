"""The front-end over a pretended engine core: outputs of every kind, n answers, stops, aborts and failures."""

from __future__ import annotations

import pytest

from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.errors import EngineDeadError, ValidationError
from tests.unit.engine.fakes import EOS, FakeClient, ids, make_engine, run_all

CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def params(kind=FINAL, **fields):
    return SamplingParams(**{"max_tokens": 50, "output_kind": kind, **fields})


def outputs_of(prompt, kind, **fields):
    engine = make_engine(FakeClient())
    engine.add_request("a", prompt, params(kind, **fields))
    return run_all(engine)


def test_the_final_output_holds_everything():
    (output,) = outputs_of("the fox", FINAL)
    assert output.finished
    assert output.prompt == "the fox"
    assert output.outputs[0].text == "the fox"
    assert output.outputs[0].token_ids == [*ids("the fox"), EOS]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_cumulative_outputs_grow():
    outputs = outputs_of("the fox", CUMULATIVE)
    assert len(outputs) == len(ids("the fox")) + 1
    for before, after in zip(outputs, outputs[1:], strict=False):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    assert outputs[-1].outputs[0].text == "the fox"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_deltas_join_to_the_whole():
    outputs = outputs_of("the fox 🙂", DELTA, logprobs=1)
    assert "".join(output.outputs[0].text for output in outputs) == "the fox 🙂"
    assert [i for output in outputs for i in output.outputs[0].token_ids] == [*ids("the fox 🙂"), EOS]
    assert all(len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids) for output in outputs)


def test_logprobs_have_the_sampled_token_first_and_no_padding():
    (output,) = outputs_of("the fox", FINAL, logprobs=1)
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)
    first = completion.logprobs[0]
    assert list(first) == [completion.token_ids[0], 40]
    assert (first[40].logprob, first[40].rank) == (-1.5, 1)
    assert first[completion.token_ids[0]].decoded_token == "the"
    assert completion.cumulative_logprob == pytest.approx(-0.5 * len(completion.token_ids))


def test_a_stop_text_ends_the_answer_and_tells_the_core():
    client = FakeClient()
    engine = make_engine(client)
    engine.add_request("a", "the quick fox jumps", params(stop=["ck f"]))
    (output,) = run_all(engine)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("the qui", "stop", "ck f")
    assert client.aborted == [0]
    assert not client.live
    assert "the quick fox jumps".startswith(engine.tokenizer.decode(completion.token_ids))


def test_a_stop_text_in_the_last_token_wins_over_the_length_limit():
    client = FakeClient()
    engine = make_engine(client)
    engine.add_request("a", "the fox", params(stop=["the"], max_tokens=1))
    (output,) = run_all(engine)
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "the")
    assert client.aborted == []


def test_a_stop_id_is_named_and_leaves_no_text():
    stop = ids("the fox")[-1]
    (output,) = outputs_of("the fox", FINAL, stop_token_ids=[stop])
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert "the fox".startswith(completion.text)
    assert completion.text != "the fox"
    (kept,) = outputs_of("the fox", FINAL, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert kept.outputs[0].text == "the fox"


def test_the_length_limit_is_named():
    (output,) = outputs_of("the fox", FINAL, max_tokens=2)
    assert output.outputs[0].finish_reason == "length"


def test_timings():
    (output,) = outputs_of("the fox", FINAL)
    stats = output.metrics
    assert (stats.queued_ts, stats.first_token_ts) == (1.0, 10.0)
    assert stats.last_token_ts == 10.0 + len(ids("the fox"))
    assert stats.num_generation_tokens == len(ids("the fox")) + 1
    assert stats.arrival_time > 0


class TestManyAnswers:
    def submit(self, kind=FINAL, prompt="the quick brown fox", **fields):
        client = FakeClient(lambda request: [*ids(f"answer {request.handle}"), EOS])
        engine = make_engine(client)
        engine.add_request("a", prompt, params(kind, n=3, **fields))
        return client, engine

    def test_answers_come_together_in_the_order_of_their_index(self):
        _, engine = self.submit()
        (output,) = run_all(engine)
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert [one.text for one in output.outputs] == ["answer 0", "answer 1", "answer 2"]
        assert output.finished

    def test_answers_are_sent_at_once_and_name_the_first_as_whose_prompt_they_share(self):
        client, engine = self.submit()
        assert [request.handle for request in client.requests] == [0, 1, 2]
        assert [request.fork_group for request in client.requests] == [0, 0, 0]
        engine.add_request("b", "the quick brown fox", params(FINAL))
        assert client.requests[3].fork_group is None

    def test_each_answer_has_a_seed_of_its_own(self):
        client, engine = self.submit(seed=5)
        run_all(engine)
        assert [request.sampling_params.seed for request in client.requests] == [5, 6, 7]
        assert [request.sampling_params.n for request in client.requests] == [1, 1, 1]
        assert len({request.seed for request in client.requests}) == 3

    def test_deltas_of_all_answers_join_to_the_whole(self):
        _, engine = self.submit(DELTA)
        texts = ["", "", ""]
        for output in run_all(engine):
            for one in output.outputs:
                texts[one.index] += one.text
        assert texts == ["answer 0", "answer 1", "answer 2"]

    def test_cumulative_outputs_hold_every_answer(self):
        _, engine = self.submit(CUMULATIVE)
        outputs = run_all(engine)
        assert all([one.index for one in output.outputs] == [0, 1, 2] for output in outputs)
        assert [output.finished for output in outputs].count(True) == 1

    @pytest.mark.parametrize("num_steps", [0, 2])
    def test_all_answers_are_aborted(self, num_steps):
        client, engine = self.submit(CUMULATIVE)
        for _ in range(num_steps):
            engine.step()
        engine.abort_request("a")
        outputs = run_all(engine)
        assert outputs[-1].finished
        assert [one.finish_reason for one in outputs[-1].outputs] == ["abort"] * 3
        assert not client.live

    def test_discarding_leaves_nothing_behind(self):
        client, engine = self.submit()
        engine.discard_requests(["a"])
        assert not engine.has_unfinished_requests()
        assert run_all(engine) == []
        engine.step()
        assert not client.live
        assert client.aborted == [0, 1, 2]


def test_an_aborted_request_gets_its_final_output():
    engine = make_engine(FakeClient())
    engine.add_request("a", "the quick brown fox", params(CUMULATIVE))
    engine.add_request("b", "the fox", params())
    engine.step()
    engine.abort_request(["a", "unknown"])
    outputs = {output.request_id: output for output in run_all(engine)}
    assert outputs["a"].outputs[0].finish_reason == "abort"
    assert outputs["b"].outputs[0].text == "the fox"
    engine.abort_request("a")


def test_a_refused_request_harms_nobody():
    client = FakeClient()
    client.max_prompt = 20
    engine = make_engine(client)
    engine.add_request("good", "the fox", params())
    with pytest.raises(ValidationError):
        engine.add_request("outside", [10**6], params())
    with pytest.raises(ValidationError, match="does not fit the cache"):
        engine.add_request("core", [7] * 30, params(n=2))
    assert [output.request_id for output in run_all(engine)] == ["good"]
    assert engine.get_num_unfinished_requests() == 0


def test_a_name_in_use_is_refused():
    engine = make_engine(FakeClient())
    engine.add_request("a", "the fox", params())
    with pytest.raises(ValidationError, match="already used"):
        engine.add_request("a", "the fox", params())
    run_all(engine)
    engine.add_request("a", "the fox", params())


def test_a_priority_without_a_policy_that_reads_it_is_refused():
    with pytest.raises(ValidationError, match="priority=3"):
        make_engine(FakeClient()).add_request("a", "the fox", params(), priority=3)


def test_a_failing_step_ends_the_engine_and_says_why():
    client = FakeClient()
    client.fails_at_step = 1
    engine = make_engine(client)
    engine.add_request("a", "the fox", params())
    engine.step()
    with pytest.raises(EngineDeadError, match="RuntimeError: the device is gone"):
        engine.step()
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError):
        engine.add_request("b", "the fox", params())
    engine.shutdown()
    assert client.is_shut_down


def test_nothing_runs_after_shutdown():
    engine = make_engine(FakeClient())
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.step()


def test_an_idle_step_gives_nothing():
    assert make_engine(FakeClient()).step() == []
