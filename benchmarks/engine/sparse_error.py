"""What attention to some blocks costs in likelihood: `python -m benchmarks.engine.sparse_error [--model leaf]`.

Texts are the model's own. Per number of blocks: their mean surprise (nats per token, over positions with more blocks
before them than that), how far it is above that of whole attention, and how often the likeliest token is the same one.
Counts, not times.
"""

from __future__ import annotations

import argparse
import random

import numpy as np

from benchmarks.texts import story_prompt
from quire import LLM, SamplingParams

BLOCK_SIZE = 16


def surprises(llm: LLM, prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Per position from the second on of all prompts: surprise of its token, and the likeliest token."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(max_tokens=1, prompt_logprobs=1),
        use_tqdm=False,
    )  # fmt: skip
    values, best = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None, "asked for"
        for token, line in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert line is not None, "of every position but the first"
            values.append(-line[token].logprob)
            best.append(max(line, key=lambda one, line=line: line[one].logprob))  # type: ignore[misc]
    return np.array(values), np.array(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="leaf")
    parser.add_argument("--tokens", type=int, default=480)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--blocks", type=int, nargs="*", default=[3, 4, 6, 8, 12, 16, 24])
    args = parser.parse_args()
    settings = {
        "block_size": BLOCK_SIZE, "max_model_len": args.tokens + 8, "gpu_memory_utilization": 0.3,
        "speculative_config": "off",
    }  # fmt: skip
    rng = random.Random(0)
    with LLM(args.model, **settings) as llm:
        params = [
            SamplingParams(temperature=0.8, seed=i, max_tokens=args.tokens, ignore_eos=True) for i in range(args.texts)
        ]
        begun = llm.chat([[{"role": "user", "content": story_prompt(rng)}] for _ in params], params, use_tqdm=False)
        texts = [[*(one.prompt_token_ids or ()), *one.outputs[0].token_ids] for one in begun]
        prompts = [text[: args.tokens] for text in texts]
        whole, likeliest = surprises(llm, prompts)
    positions = np.concatenate([np.arange(1, len(prompt)) for prompt in prompts])
    print(f"{args.model}: {len(prompts)} texts of {args.tokens} tokens, blocks of {BLOCK_SIZE}")
    print("| blocks | of the tokens | surprise, whole | surprise | more | same likeliest token |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num_blocks in args.blocks:
        with LLM(args.model, sparse_attention_blocks=num_blocks, **settings) as llm:
            values, best = surprises(llm, prompts)
        is_sparse = positions - 1 >= num_blocks * BLOCK_SIZE
        same = values[~is_sparse] == whole[~is_sparse]
        assert same.all(), "where all blocks fit, attention is whole"
        mean, more = whole[is_sparse].mean(), (values - whole)[is_sparse].mean()
        agree = (best == likeliest)[is_sparse].mean()
        print(
            f"| {num_blocks} | {num_blocks * BLOCK_SIZE / args.tokens:.0%} | {mean:.3f} | {mean + more:.3f} "
            f"| {more:+.4f} | {agree:.1%} |", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
