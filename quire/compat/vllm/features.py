"""The features behind vLLM's names that Quire does not have, in the words of the messages that name them."""

from __future__ import annotations

POOLING = "pooling models (embeddings, classification, scores, rewards)"
MULTIMODAL = "image, audio or video inputs"
LORA = "LoRA adapters"
PROMPT_EMBEDS = "prompts given as embeddings"
PLUGIN_MODELS = "model classes registered from outside"
WEIGHT_TRANSFER = "weight updates of a running engine"
KV_TRANSFER = "vLLM's own KV connectors (docs/how-to/connectors.md has Quire's)"
EC_TRANSFER = "transfer of encoder outputs between engines"
PARALLEL = "tensor, pipeline or data parallelism"
PROFILER = "profiler control (start_profile, stop_profile)"
COMPILATION = "compilation settings"
RAY = "execution on a Ray cluster"
RUNNER_V2 = "logits processors of vLLM's second model runner (port them to update_state/apply)"
FLAT_LOGPROBS = "flat log-probabilities (flat_logprobs)"
REPETITION = "repetition_detection"
WATERMARK = "watermarking"
INTERNALS = "this internal module of vLLM"
SHARDED = "sharded checkpoint formats (sharded_state, tensorizer)"
TENSORS = "tensors in requests or responses (embeddings)"

# Names of vLLM's top level -> what they would need.
TOP_LEVEL = {
    "PoolingParams": POOLING,
    "PoolingOutput": POOLING,
    "PoolingRequestOutput": POOLING,
    "EmbeddingOutput": POOLING,
    "EmbeddingRequestOutput": POOLING,
    "ClassificationOutput": POOLING,
    "ClassificationRequestOutput": POOLING,
    "ScoringOutput": POOLING,
    "ScoringRequestOutput": POOLING,
    "ModelRegistry": PLUGIN_MODELS,
    "initialize_ray_cluster": RAY,
}
