"""The common cases through OpenVINO GenAI's continuous batching on the CPU.

    python -m venv /tmp/peers/openvino
    /tmp/peers/openvino/bin/pip install torch==2.13.0 openvino-genai openvino-tokenizers optimum-intel
    /tmp/peers/openvino/bin/pip uninstall -y torchvision
    /tmp/peers/openvino/bin/optimum-cli export openvino -m build/checkpoints/qwen-0.5b \
        --task text-generation-with-past --weight-format fp16 /tmp/peers/ov/qwen-0.5b
    /tmp/peers/openvino/bin/python -m benchmarks.peers.openvino_genai /tmp/peers/ov/qwen-0.5b

torch and optimum-intel are for the export alone. On a CPU that computes bfloat16 natively it does so whatever the
format of the exported weights; `int8` or `int4` in place of `fp16` quantizes them.
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.workload import Prompts, pick_cases, print_json, run_cases


def main() -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of the exported model")
    parser.add_argument("--cases", default="all")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096, help="of one step")
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    args = parser.parse_args()
    cases = pick_cases(args.cases)
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = args.kv_cache_gib
    scheduler.max_num_batched_tokens = args.max_num_batched_tokens
    scheduler.max_num_seqs = 256
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", {})

    def generate(prompts: Prompts, output_len: int) -> int:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        tensors = [openvino.Tensor(np.asarray([ids], dtype=np.int64)) for ids in prompts]
        outputs = pipeline.generate(tensors, [config] * len(prompts))
        return sum(len(output.m_generation_ids[0]) for output in outputs)

    generate([[5, 6, 7, 8]], 1)
    start_s = time.perf_counter() - start
    print(f"CASE start: until the first token {start_s:.1f} s", flush=True)
    results = run_cases(cases, generate)
    print_json(
        {"engine": f"OpenVINO GenAI {genai.__version__}", "model": args.model, "start_s": start_s, "cases": results}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
