"""Words that users of vLLM, Ollama, llama.cpp and SGLang type, and what to write here; data only.

Read where a name is unknown: flags by `entrypoints.args`, commands by `cli.main`, parameters by
`core.sampling_params`. What is a name of vLLM 0.33's settings is not here but in `config.not_yet_table`.
"""

from __future__ import annotations

_WHOLE_MODEL = "leave it out: the whole model runs on one device (--device cpu or cuda)"
_CONTEXT = "use --max-model-len"
_THREADS = "use --num-threads"
_MODEL = "give the model by position, or with --model"
_MAPPED = "leave it out: weight files are mapped into memory"
_NO_EFFECT = "leave it out: it has no effect in Quire"
_PARALLEL = "use --max-num-seqs"
_CACHE_DTYPE = "use --kv-cache-dtype"
_OVERRIDES = "use --hf-overrides with rope_parameters"
_PARTIAL = "use --long-prefill-token-threshold and --max-num-batched-tokens"
_GRAMMARS = "use --structured-outputs-backend"
_DRAFT = "use --spec-model MODEL, or --spec-method suffix, which needs none"
_LOOKUP = "use --speculative-config with prompt_lookup_max and prompt_lookup_min"
_ACCEPTANCE = "use --speculative-config with acceptance"
_OWN_BENCH = "leave it out: quire bench measures Quire's own engine"
_DATASET = "write the prompts as JSON lines and use --dataset-name custom --dataset-path FILE"
_LIST = "quire list shows the downloaded models"
_SERVERS = "a server runs in the foreground: see quire top, GET /health and /v1/models; stop it with Ctrl-C or SIGTERM"

FLAGS: dict[str, str] = {
    # Context, batch, threads.
    "-c": _CONTEXT, "--ctx-size": _CONTEXT, "--n-ctx": _CONTEXT, "--num-ctx": _CONTEXT, "--context-length": _CONTEXT,
    "--context-size": _CONTEXT, "--max-seq-len": _CONTEXT, "--max-context-len": _CONTEXT,
    "--max-seq-len-to-capture": _NO_EFFECT, "--max-context-len-to-capture": _NO_EFFECT,
    "-t": _THREADS, "--threads": _THREADS, "-tb": _THREADS, "--threads-batch": _THREADS, "--num-thread": _THREADS,
    "-b": "use --max-num-batched-tokens", "--batch-size": "use --max-num-batched-tokens, or --max-num-seqs",
    "-ub": "use --max-num-batched-tokens", "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--max-prefill-tokens": "use --max-num-batched-tokens", "--max-batch-size": _PARALLEL,
    "-np": _PARALLEL, "--parallel": _PARALLEL, "--num-parallel": _PARALLEL, "--max-running-requests": _PARALLEL,
    "-cb": "leave it out: requests are always batched continuously",
    "--cont-batching": "leave it out: requests are always batched continuously",
    # Devices and memory.
    "-ngl": _WHOLE_MODEL, "--n-gpu-layers": _WHOLE_MODEL, "--gpu-layers": _WHOLE_MODEL, "--num-gpu": _WHOLE_MODEL,
    "--num-gpu-layers": _WHOLE_MODEL, "--split-mode": _WHOLE_MODEL, "--tensor-split": _WHOLE_MODEL,
    "--main-gpu": "set CUDA_VISIBLE_DEVICES", "--gpu": "use --device cuda", "--cuda": "use --device cuda",
    "--cpu": "use --device cpu", "--mlock": _MAPPED, "--no-mmap": _MAPPED, "--mmap": _MAPPED,
    "--mem-fraction-static": "use --gpu-memory-utilization", "--gpu-mem": "use --gpu-memory-utilization",
    "-fa": "use --attention-backend", "--flash-attn": "use --attention-backend",
    "-ctk": _CACHE_DTYPE, "-ctv": _CACHE_DTYPE, "--cache-type-k": _CACHE_DTYPE, "--cache-type-v": _CACHE_DTYPE,
    "--tp": "use --tensor-parallel-size", "--tp-size": "use --tensor-parallel-size",
    "--dp-size": "use --data-parallel-size", "--pp-size": "use --pipeline-parallel-size",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--disable-prefix-caching": "use --no-enable-prefix-caching",
    # Model and template.
    "-m": _MODEL, "--model-path": _MODEL, "--model-name-or-path": _MODEL, "--model-id": _MODEL, "--hf-repo": _MODEL,
    "-hf": _MODEL, "-hfr": _MODEL, "--hf-file": "name ORG/REPO:Q4_K_M, ORG/REPO:FILE.gguf, or a .gguf file",
    "-a": "use --served-model-name", "--alias": "use --served-model-name",
    "--jinja": "leave it out: the model's chat template is always used",
    "--chat-template-file": "use --chat-template, which takes a path",
    "--quant": "use --quantization int8 or int4", "--lora": "LoRA adapters are not supported yet: merge it",
    "--rope-scaling": _OVERRIDES, "--rope-theta": _OVERRIDES, "--rope-freq-base": _OVERRIDES, "--yarn": _OVERRIDES,
    "--embedding": "Quire does not have pooling models", "--embeddings": "Quire does not have pooling models",
    "--task": "leave it out: Quire generates text",
    # Sampling and logs.
    "-n": "use --max-tokens", "--n-predict": "use --max-tokens", "--num-predict": "use --max-tokens",
    "--max-new-tokens": "use --max-tokens", "--temp": "use --temperature",
    "--repeat-penalty": "use --repetition-penalty",
    "--best-of": "use n, or use_beam_search in a request",
    "-v": "use --log-level debug", "--verbose": "use --log-level debug", "--debug": "use --log-level debug",
    "--log-disable": "use --log-level error", "--log-requests": "use --enable-log-requests",
    "--metrics": "leave it out: /metrics is always there", "--enable-metrics": "leave it out: /metrics is always there",
    "--slots": "leave it out: see /load and /metrics",
    "--stream": "each request chooses whether to stream",
    # Earlier releases of vLLM.
    "--guided-decoding-backend": _GRAMMARS, "--grammar-backend": _GRAMMARS,
    "--enable-reasoning": "use --reasoning-parser", "--num-scheduler-steps": _NO_EFFECT,
    "--use-v2-block-manager": _NO_EFFECT, "--worker-use-ray": _NO_EFFECT, "--engine-use-ray": _NO_EFFECT,
    "--num-lookahead-slots": _NO_EFFECT, "--disable-async-output-proc": _NO_EFFECT, "--cuda-graph-sizes": _NO_EFFECT,
    "--tokenizer-pool-size": _NO_EFFECT, "--disable-frontend-multiprocessing": _NO_EFFECT,
    "--multi-step-stream-outputs": _NO_EFFECT, "--disable-mm-preprocessor-cache": _NO_EFFECT,
    "--max-num-partial-prefills": _PARTIAL, "--max-long-partial-prefills": _PARTIAL,
    "--omni": "leave it out: Quire generates text",
    "--speculative-disable-by-batch-size": "leave it out: the number of drafts follows from measured costs",
    "--lora-extra-vocab-size": "LoRA adapters are not supported yet: merge it",
    "--disable-logprobs-during-spec-decoding": _NO_EFFECT,
    "--override-pooler-config": "Quire does not have pooling models",
    # Benchmarks of vLLM.
    "--async-engine": "leave it out: quire bench serve measures the asynchronous engine, behind a server",
    "--hf-max-batch-size": _OWN_BENCH, "--hf-subset": _DATASET, "--hf-split": _DATASET, "--hf-name": _DATASET,
    "--hf-output-len": _DATASET, "--sonnet-input-len": _DATASET, "--sonnet-output-len": _DATASET,
    "--sonnet-prefix-len": _DATASET, "--dataset": "use --dataset-name and --dataset-path",
    "--lora-path": "LoRA adapters are not supported yet: merge it", "--sharegpt-output-len": "use --output-len",
    "--custom-output-len": "use --output-len, or output_tokens in the file",
    "--ramp-up-strategy": "leave it out: use --request-rate with --burstiness, in several runs",
    # Speculative decoding.
    "--num-speculative-tokens": "use --spec-tokens", "--speculative-model": "use --spec-model",
    "--model-draft": _DRAFT, "-md": _DRAFT, "--draft-max": "use --spec-tokens", "--draft": "use --spec-tokens",
    "--speculative-algorithm": "use --spec-method", "--speculative-draft-model-path": "use --spec-model",
    "--speculative-num-draft-tokens": "use --spec-tokens", "--ngram-prompt-lookup-max": _LOOKUP,
    "--ngram-prompt-lookup-min": _LOOKUP, "--spec-decoding-acceptance-method": _ACCEPTANCE,
    "--no-speculation": "use --speculative-config off", "--disable-speculation": "use --speculative-config off",
}  # fmt: skip

COMMANDS: dict[str, str] = {
    "download": "quire pull MODEL", "get": "quire pull MODEL", "fetch": "quire pull MODEL",
    "install": "quire pull MODEL", "remove": "quire rm MODEL", "delete": "quire rm MODEL",
    "uninstall": "quire rm MODEL", "models": _LIST,
    "push": "Quire does not publish models", "create": "name a model directory: quire serve DIRECTORY",
    "cp": "copy the model's directory; quire list --json shows where it is", "ls": _LIST,
    "show": "quire inspect MODEL describes a model; quire serve MODEL --print-config shows its settings",
    "ps": _SERVERS, "stop": _SERVERS, "start": "quire serve MODEL", "launch": "quire serve MODEL",
    "server": "quire serve MODEL", "api": "quire serve MODEL", "openai": "quire serve MODEL",
    "complete": "quire generate PROMPT", "cli": "quire chat MODEL",
    "env": "quire collect-env", "info": "quire inspect MODEL, or quire collect-env",
    "benchmark": "quire bench serve, latency or throughput", "preload": "quire serve MODEL loads a model",
    "download-kernels": "leave it out: the kernels are part of the installation",
    "snapshot": "quire serve caches packed weights on disk automatically", "config": "quire serve MODEL --print-config",
    "convert": "models in Hugging Face format and GGUF files are read without conversion",
    "embed": "Quire does not have pooling models",
    "quantize": "quire serve MODEL --quantization int8 (or int4) quantizes while loading",
    "tokenize": "a server has POST /tokenize", "upgrade": "pip install --upgrade quire",
}  # fmt: skip

BENCHMARKS: dict[str, str] = {
    "startup": "quire serve logs startup time by phase", "sweep": "quire plan --sweep",
    "run": "quire bench serve",
    "server": "quire bench serve", "online": "quire bench serve", "offline": "quire bench throughput",
}  # fmt: skip

PARAMETERS: dict[str, str] = {
    "best_of": "use n, or a beam search",
    "logits_processors": "pass them to the engine: LLM(logits_processors=[...]) or --logits-processors",
    "truncate_prompt_tokens": "truncate the prompt's token ids, or send truncate_prompt_tokens to a server",
    "max_new_tokens": "use max_tokens", "max_length": "use max_tokens", "num_return_sequences": "use n",
    "do_sample": "use temperature (0 is greedy)", "length_penalty": "it is a field of BeamSearchParams",
    "early_stopping": "it is a field of BeamSearchParams", "use_beam_search": "use LLM.beam_search",
    "guided_decoding": "use structured_outputs", "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs", "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs", "stop_strings": "use stop", "repeat_penalty": "use repetition_penalty",
    "num_beams": "use LLM.beam_search", "typical_p": "it is not supported; use min_p or top_p",
    "eos_token_id": "use stop_token_ids",
}  # fmt: skip
