"""The features behind vLLM's names that Quire does not have, in the words of the messages that name them."""

from __future__ import annotations

POOLING = "pooling models (embeddings, classification, scores, rewards)"
MULTIMODAL = "image, audio or video inputs"
LORA = "LoRA adapters"
PROMPT_EMBEDS = "prompts given as embeddings"
PLUGIN_MODELS = "model classes registered from outside"
WEIGHT_TRANSFER = (
    "weight updates between processes (a server has /update_weights, AsyncLLM update_weights, from a directory)"
)
KV_TRANSFER = "vLLM's own KV connectors (docs/how-to/connectors.md has Quire's)"
EC_TRANSFER = "transfer of encoder outputs between engines"
PARALLEL = "vLLM's groups of processes (tensor_parallel_size and the like work; LLM.get_world_size counts the ranks)"
PROFILER = "vLLM's own profilers (profiler_config and LLM.start_profile work)"
COMPILATION = "vLLM's compiler (compilation_config is accepted, without effect)"
RAY = "vLLM's own start of Ray (use distributed_executor_backend='ray')"
RUNNER_V2 = "logits processors of vLLM's second model runner (port them to update_state/apply)"
WORKERS = (
    "vLLM's worker classes (functions go to LLM.collective_rpc) and logits processors of its second model runner "
    "(port them to update_state/apply)"
)
FLAT_LOGPROBS = "flat log-probabilities (flat_logprobs)"
REPETITION = "repetition_detection"
WATERMARK = "watermarking"
CONVERSATIONS = (
    "the steps of vLLM's chat rendering (LLM.chat takes messages; get_tokenizer().apply_chat_template renders)"
)
SERVER = "the parts of vLLM's server (main([...]) of this module, or quire serve, starts Quire's)"
GUIDED = "guided_decoding of earlier versions (StructuredOutputsParams for SamplingParams.structured_outputs)"
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
