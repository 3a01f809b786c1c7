"""What structured output costs: a decode step of a structured batch over that of a free one, and the delay of a grammar
that is compiled already.

The model has the shape of a 0.5B one with a vocabulary of 128k and random weights. Run alone on the machine:

    python -m benchmarks.engine.bench_structured --batch 64 --steps 40

Both kinds of batch take turns in one sitting. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.tokenization.token_bytes import byte_level_alphabet

VOCAB_SIZE = 131072
EOS = "<eos>"
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        },
        "required": ["name", "age", "tags"],
    },
}


def write_model(directory: Path) -> None:
    """config.json and a byte-level tokenizer of so many random words; the weights are made by `load_format`."""
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 256,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    vocabulary = {letters[byte]: byte for byte in range(256)}
    vocabulary[EOS] = 256
    rng = random.Random(0)
    while len(vocabulary) < VOCAB_SIZE:
        word = rng.choice(["", " "]) + "".join(
            rng.choices(string.ascii_letters + '"{}[]:, .-0123456789', k=rng.randint(2, 8))
        )
        vocabulary.setdefault("".join(letters[byte] for byte in word.encode()), len(vocabulary))
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{
            "id": 256, "content": EOS, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True,
        }],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": False},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))


def params_of(is_structured: bool, max_tokens: int) -> SamplingParams:
    """Random, never ending; structured or free."""
    form = {"json": SCHEMA, "disable_any_whitespace": True} if is_structured else None
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, structured_outputs=form)


def decode_steps(llm: LLM, is_structured: bool, batch: int, steps: int) -> list[float]:
    """Seconds of steps in which the whole batch decodes."""
    engine = llm.llm_engine
    for index in range(batch):
        prompt = {"prompt_token_ids": [100 + index, 7, 8, 9]}
        engine.add_request(f"{is_structured}-{index}", prompt, params_of(is_structured, steps + 8))
    seconds = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        if engine.last_stats is not None and engine.last_stats.num_scheduled_tokens == batch:
            seconds.append(time.perf_counter() - start)
    return seconds[2:-2]


def first_token_seconds(llm: LLM, is_structured: bool, number: int) -> float:
    """From submission to the first token, of one request alone."""
    start = time.perf_counter()
    llm.generate({"prompt_token_ids": [300 + number, 5, 6]}, params_of(is_structured, 1), use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Cost of structured output.")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        # The random words of this vocabulary make the grammar dearer to compile than a real one does.
        llm = LLM(directory, load_format="dummy", max_num_seqs=args.batch, max_model_len=512,
                  structured_outputs_config={"compile_timeout": 60.0}, speculative_config="off")  # fmt: skip
        start = time.perf_counter()
        first_token_seconds(llm, True, 0)
        compile_s = time.perf_counter() - start
        for is_structured in (True, False):
            decode_steps(llm, is_structured, args.batch, 4)
        steps: dict[bool, list[float]] = {True: [], False: []}
        firsts: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(args.rounds):
            for is_structured in (False, True):
                steps[is_structured] += decode_steps(llm, is_structured, args.batch, args.steps)
        for number in range(1, 21):
            for is_structured in (False, True):
                firsts[is_structured].append(first_token_seconds(llm, is_structured, number))
        llm.llm_engine.shutdown()
    step_s = {kind: statistics.median(found) for kind, found in steps.items()}
    first_s = {kind: statistics.median(found) for kind, found in firsts.items()}
    figures: dict[str, Any] = {
        "batch": args.batch, "vocab_size": VOCAB_SIZE, "step_free_s": step_s[False], "step_structured_s": step_s[True],
        "step_ratio": step_s[True] / step_s[False], "first_token_delay_s": first_s[True] - first_s[False],
        "first_with_compilation_s": compile_s,
    }  # fmt: skip
    print(f"decode step of {args.batch}: free {1e3 * step_s[False]:.1f} ms, structured {1e3 * step_s[True]:.1f} ms")
    print(f"first token of a cached schema: {1e3 * figures['first_token_delay_s']:.2f} ms later")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
