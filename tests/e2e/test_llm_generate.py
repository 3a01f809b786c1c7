"""The whole engine on a tiny random checkpoint: what users do, and what must be refused."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from quire import LLM, LLMEngine, RequestOutputKind, SamplingParams
from quire.cli.main import main
from quire.core.outputs import RequestOutput
from quire.errors import QuireError, ValidationError
from tests.models.checkpoints import make_checkpoint

SETTINGS = {"dtype": "float32", "max_model_len": 256, "block_size": 16, "max_num_seqs": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The quick brown fox", "Pages are gathered into a quire", "How many tokens?", "x"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", path)
    return path


@pytest.fixture(scope="module")
def llm(checkpoint: Path):
    with LLM(str(checkpoint), **SETTINGS) as llm:
        yield llm


def answer(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def test_a_batch_equals_one_at_a_time(llm):
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in together] == PROMPTS
    assert [answer(output) for output in together] == [answer(llm.generate(p, GREEDY)[0]) for p in PROMPTS]


def test_text_is_the_decoded_tokens(llm):
    tokenizer = llm.get_tokenizer()
    for output in llm.generate(PROMPTS, GREEDY):
        ids = output.prompt_token_ids + answer(output)
        assert tokenizer.decode(ids, True) == tokenizer.decode(output.prompt_token_ids, True) + output.outputs[0].text


def test_deltas_join_to_the_final_output(llm):
    (final,) = llm.generate(PROMPTS[0], GREEDY)
    engine, streamed = llm.llm_engine, GREEDY.clone()
    streamed.output_kind = RequestOutputKind.DELTA
    engine.add_request("stream", PROMPTS[0], streamed)
    text, token_ids = "", []
    while engine.has_unfinished_requests():
        for output in engine.step():
            text += output.outputs[0].text
            token_ids += output.outputs[0].token_ids
    assert (text, token_ids) == (final.outputs[0].text, answer(final))


def test_a_stop_text_cuts_the_answer(llm):
    (whole,) = llm.generate(PROMPTS[0], GREEDY)
    text = whole.outputs[0].text
    stop = text[4:6]
    params = GREEDY.clone()
    params.stop = [stop]
    (cut,) = llm.generate(PROMPTS[0], params)
    assert cut.outputs[0].text == text[: text.find(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert answer(whole)[: len(answer(cut))] == answer(cut)


def test_many_answers_share_their_prompt(llm):
    assert llm.reset_prefix_cache()
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": list(range(5, 105))}, params)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4
    singles = []
    for index in range(4):
        single = SamplingParams(temperature=1.0, seed=3 + index, max_tokens=8, ignore_eos=True)
        singles.append(answer(llm.generate({"prompt_token_ids": list(range(5, 105))}, single)[0]))
    assert [one.token_ids for one in output.outputs] == singles


def test_unseeded_requests_repeat_with_the_engines_seed(checkpoint):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        with LLM(str(checkpoint), seed=seed, **SETTINGS) as llm:
            runs.append([answer(output) for output in llm.generate([PROMPTS[0]] * 3, params)])
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(ids) for ids in runs[0]}) == 3


def test_bad_words_and_min_tokens_are_kept(llm):
    (free,) = llm.generate(PROMPTS[1], GREEDY)
    banned = llm.get_tokenizer().token_text(answer(free)[0])
    params = GREEDY.clone()
    if banned.strip() and "\ufffd" not in banned:
        params.bad_words = [banned]
        (kept,) = llm.generate(PROMPTS[1], params)
        assert banned not in kept.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=20, min_tokens=20)
    assert len(answer(llm.generate(PROMPTS[1], params)[0])) == 20


def test_logprobs_of_prompt_and_answer(llm):
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    (output,) = llm.generate(PROMPTS[0], params)
    completion = output.outputs[0]
    assert [next(iter(line)) for line in completion.logprobs] == completion.token_ids
    assert all(line[token].rank == 1 for line, token in zip(completion.logprobs, completion.token_ids, strict=True))
    assert completion.cumulative_logprob == pytest.approx(
        sum(line[token].logprob for line, token in zip(completion.logprobs, completion.token_ids, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_chat_uses_the_models_template(llm):
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_prompt_is_never_cut(llm):
    with pytest.raises(ValidationError, match=r"context length is 256 tokens. However, the prompt has 300 tokens"):
        llm.generate({"prompt_token_ids": [7] * 300}, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()


def test_an_answer_ends_at_the_models_length(llm):
    (output,) = llm.generate({"prompt_token_ids": [7] * 250}, SamplingParams(max_tokens=50, ignore_eos=True))
    assert (len(answer(output)), output.outputs[0].finish_reason) == (6, "length")


def test_ids_alone_need_no_tokenizer(checkpoint, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(answer(output)) == 3
        assert output.outputs[0].text == ""
        with pytest.raises(ValidationError, match="skip_tokenizer_init"):
            llm.generate("text")


def test_engine_settings_by_name(checkpoint):
    engine = LLMEngine.from_engine_args({"model": str(checkpoint), **SETTINGS})
    assert engine.config.model.max_model_len == 256
    engine.shutdown()


BAD_DIRECTORIES = {
    "no tokenizer": {"tokenizer.json": None},
    "broken tokenizer": {"tokenizer.json": b"{"},
    "looping template": {
        "chat_template.jinja": b"{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    },
    "growing template": {"chat_template.jinja": b"{{ 'a' * 10**10 }}"},
    "escaping template": {"chat_template.jinja": b"{{ ''.__class__.__mro__[1].__subclasses__() }}"},
    "broken template": {"chat_template.jinja": b"{% if %}"},
    "broken generation config": {"generation_config.json": b'{"temperature": "hot"}'},
    "eos outside the vocabulary": {"generation_config.json": b'{"eos_token_id": 100000}'},
}


@pytest.mark.parametrize("changes", BAD_DIRECTORIES.values(), ids=BAD_DIRECTORIES)
def test_a_bad_directory_is_refused_before_weights_are_read(checkpoint, tmp_path, changes):
    for file in checkpoint.iterdir():
        if file.suffix == ".json" or file.suffix == ".jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, content in changes.items():
        (tmp_path / name).unlink(missing_ok=True)
        if content is not None:
            (tmp_path / name).write_bytes(content)
    start = time.process_time()
    with pytest.raises(QuireError) as caught:
        LLM(str(tmp_path), **SETTINGS)  # there are no weights in it: reaching them would be another error
    assert caught.value.field in ("tokenizer", "tokenizer.json", "chat_template", "temperature", "eos_token_id")
    assert caught.value.hint
    assert time.process_time() - start < 20, "it takes well under two seconds of CPU time"


def test_the_command_line_generates(checkpoint, capsys):
    argv = ["generate", "--model", str(checkpoint), "--dtype", "float32", "--max-model-len", "256", "--json"]
    assert main([*argv, "--temperature", "0", "--max-tokens", "5", "--ignore-eos", *PROMPTS[:2]]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(record["outputs"][0]["token_ids"]) for record in records] == [5, 5]


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "latency", "--num-iters", "1", "--num-iters-warmup", "0", "--batch-size", "2"],
        ["bench", "latency", "--num-iters", "1", "--num-iters-warmup", "0", "--use-beam-search", "--n", "2"],
        ["bench", "throughput", "--num-prompts", "3", "--num-warmup", "1", "--backend", "vllm", "--n", "2"],
        [
            "bench",
            "throughput",
            "--num-prompts",
            "3",
            "--dataset-name",
            "prefix_repetition",
            "--disable-detokenize",
            "--prefix-repetition-prefix-len",
            "16",
            "--prefix-repetition-suffix-len",
            "4",
            "--prefix-repetition-output-len",
            "4",
            "--num-warmups",
            "0",
        ],
    ],
    ids=["latency", "beams", "throughput", "prefixes"],
)
def test_a_benchmark_ends_with_one_json_object(checkpoint, capsys, argv):
    sizes = ["--input-len", "8", "--output-len", "4", "--model", str(checkpoint), "--max-model-len", "256"]
    assert main([*argv, *sizes]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["benchmark"] == argv[1]
    assert result["output_tokens_per_s"] > 0
    assert result["model"] == str(checkpoint)
    assert result["threads"] >= 1


def test_throughput_of_a_file_of_prompts(checkpoint, capsys, tmp_path):
    lines = [json.dumps({"prompt": text, "output_tokens": 3}) for text in PROMPTS[:3]]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    argv = ["--dataset-name", "custom", "--dataset-path", str(tmp_path / "prompts.jsonl"), "--num-prompts", "2"]
    argv += [
        "--num-warmup",
        "1",
        "--model",
        str(checkpoint),
        "--max-model-len",
        "256",
        "--profile",
        str(tmp_path / "p"),
    ]
    assert main(["bench", "throughput", *argv]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["dataset_name"] == "custom" and result["num_output_tokens"] == 6 and result["num_prompt_tokens"]
    assert list((tmp_path / "p").glob("*.json")), "what was timed was profiled"
