"""Which model is served, and how its weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting
from quire.config.json_object import parse_object
from quire.config.not_yet import QUANTIZATIONS_NOT_YET
from quire.config.overrides import GENERATION_FIELDS, HF_FIELDS
from quire.config.quantized_checkpoint import CHECKPOINT_FORMATS
from quire.errors import UnsupportedError
from quire.plugins import QUANTIZATION, find_plugin

ONLINE_QUANTIZATIONS = ("int8", "int4", "fp8", "bitsandbytes")
"""Formats that plain weights are brought into while they are loaded, for the native kernels."""
OWN_QUANTIZATIONS = ("int8", "int4", *CHECKPOINT_FORMATS)
"""Those, and formats that only checkpoints have."""
STORED_QUANTIZATIONS = ("gguf",)
"""They say what the checkpoint is, and change nothing."""
LONGEST = -1
"""`max_model_len`: the longest that fits the memory for the KV cache."""
DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its tokenizer and the limits of a request."""

    model: str = setting("leaf", "Model: 'leaf' (embedded), a local directory in Hugging Face format, or a hub id.")
    served_model_names: tuple[str, ...] = setting(
        (), "Model names that the API accepts; the first is used in outputs. Default: the model as given.",
        flag="served_model_name",
    )  # fmt: skip
    tokenizer: str | None = setting(
        None, "Directory or hub id of the tokenizer; default: the model's.", overruled_by=("skip_tokenizer_init",)
    )
    skip_tokenizer_init: bool = setting(
        False, "Do not load a tokenizer: token ids in and out only, no text, no stop strings."
    )
    revision: str | None = setting(None, "Branch, tag or commit on the hub.")
    tokenizer_revision: str | None = setting(
        None,
        "Branch, tag or commit of the tokenizer on the hub; default: the model's revision, if the tokenizer "
        "is the model's own.",
        overruled_by=("skip_tokenizer_init",),
    )
    hf_overrides: str | None = setting(
        None, "JSON object: fields that override those of config.json, such as rope_scaling, max_position_embeddings.",
        is_json=True,
    )  # fmt: skip
    model_impl: str = setting(
        "auto",
        "Which code computes the model: quire, transformers (a class of that library, on Quire's attention and KV "
        "cache; needs quire[transformers]), or auto: Quire's where it has the family. vllm means quire.",
        choices=("auto", "quire", "transformers", "vllm"),
    )
    dtype: str = setting(
        "auto",
        "Type of weights and activations. bfloat16 and float32 give the same tokens in every batch; "
        "float16 on a CPU has no native kernels, and its results depend on the batch (by rounding).",
        choices=DTYPES,
    )
    quantization: str | None = setting(
        None,
        "Quantize the weights while loading, for the native CPU kernels: int8 (a scale per output), int4 (a scale per "
        "output and group; the token table stays int8), fp8 (a scale per output) or bitsandbytes (nf4). Of a quantized "
        "checkpoint its own format, which is found in config.json: gptq, awq, compressed-tensors, fp8, mxfp4, "
        "bitsandbytes, or a name that vLLM has for one of these; gguf of a GGUF file.",
        choices=(*OWN_QUANTIZATIONS, *STORED_QUANTIZATIONS), plugins=QUANTIZATION, short="-q",
    )  # fmt: skip
    quantization_report: bool = setting(False, "Log the quantization error of each tensor.")
    max_model_len: int | None = setting(
        None, "Maximum length of prompt plus output, in tokens; default: the model's own limit. -1 or auto: as much of "
        "that as fits the memory for the KV cache.",
        minimum=1, maximum=2**30, auto=LONGEST, is_size=True,
    )  # fmt: skip
    seed: int = setting(0, "Seed of the engine, for requests without a seed of their own.")
    max_logprobs: int = setting(
        20, "Maximum number of log-probabilities per token that a request may ask for; -1 = no limit.", minimum=-1
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        "What log-probability fields contain: values before (raw) or after (processed) masks, penalties and "
        "temperature.",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )
    generation_config: str = setting(
        "auto", "Default sampling parameters: 'auto' (the model's generation_config.json), 'neutral', or 'vllm', which "
        "means neutral.", choices=("auto", "neutral", "vllm"),
    )  # fmt: skip
    override_generation_config: str | None = setting(
        None, 'JSON object: defaults that override those of generation_config.json, such as {"temperature": 0.5}.',
        is_json=True,
    )  # fmt: skip
    enforce_eager: bool = setting(
        False,
        "Run every step kernel by kernel; otherwise steps of few tokens are captured once and replayed where that is "
        "faster.",
    )
    chat_template: str | None = setting(
        None, "Chat template: inline Jinja or a path; default: the tokenizer's.", overruled_by=("skip_tokenizer_init",)
    )
    logits_processors: tuple[str, ...] = setting(
        (), "Custom logits processors: module:Class, or the name of a plugin; requests pass arguments by vllm_xargs."
    )

    def __post_init__(self) -> None:
        name = self.quantization
        if isinstance(name, str) and name in QUANTIZATIONS_NOT_YET and find_plugin(QUANTIZATION, name) is None:
            raise UnsupportedError(
                f"quantization={self.quantization!r} is a vLLM option that Quire does not implement yet",
                hint=f"use {', '.join(ONLINE_QUANTIZATIONS)} with an unquantized checkpoint: its weights are quantized "
                "while loading; or a checkpoint in GPTQ, AWQ, compressed-tensors, FP8, NF4 or MXFP4, and leave it out",
                field="quantization",
            )
        check_settings(self)
        parse_object("hf_overrides", self.hf_overrides, HF_FIELDS)
        parse_object("override_generation_config", self.override_generation_config, GENERATION_FIELDS)

    @property
    def served_model_name(self) -> str | None:
        """The first of the names; None where a rule has yet to choose."""
        return self.served_model_names[0] if self.served_model_names else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Where weights come from."""

    load_format: str = setting(
        "auto",
        "'auto' reads what the model consists of, 'safetensors' or 'gguf' that alone; 'dummy' uses seeded random "
        "weights.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    packing_cache: bool = setting(
        True, "Cache the packed weights of the native kernels on disk (QUIRE_CACHE_DIR), for faster startup."
    )
    download_dir: str | None = setting(None, "Directory for files from the hub; default: the hub client's cache.")

    def __post_init__(self) -> None:
        check_settings(self)
