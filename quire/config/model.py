"""Which model is served, and how its weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting
from quire.config.not_yet import QUANTIZATIONS_NOT_YET
from quire.errors import UnsupportedError

DTYPES = ("auto", "half", "float16", "bfloat16", "float", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its tokenizer and the limits of a request."""

    model: str = setting("leaf", "Model: 'leaf' (embedded), a local directory in Hugging Face format, or a hub id.")
    served_model_name: str | None = setting(None, "Name that outputs and the API use; default: the model as given.")
    tokenizer: str | None = setting(None, "Directory or hub id of the tokenizer; default: the model's.")
    skip_tokenizer_init: bool = setting(False, "Token ids in and out only; no text, no stop strings.")
    trust_remote_code: bool = setting(False, "Refused when true: Quire never runs code from a model directory.")
    revision: str | None = setting(None, "Branch, tag or commit on the hub.")
    dtype: str = setting("auto", "Type of weights and activations.", choices=DTYPES)
    quantization: str | None = setting(
        None,
        "Quantize the weights while they are loaded, for the native CPU kernels: int8 (a scale per output) or int4 "
        "(a scale per output and group; the token table stays int8). Activations are quantized per token.",
        choices=("int8", "int4"), short="-q",
    )  # fmt: skip
    quantization_report: bool = setting(False, "Log how far each quantized tensor is from the checkpoint's.")
    max_model_len: int | None = setting(
        None, "Longest prompt plus output, in tokens; default: the model's own limit.",
        minimum=1, maximum=2**30, is_size=True,
    )  # fmt: skip
    seed: int = setting(0, "Seed of the engine: unseeded requests derive their random numbers from it.")
    max_logprobs: int = setting(
        20, "Most log-probabilities a request may ask for per token; -1 = no limit.", minimum=-1
    )
    logprobs_mode: str = setting(
        "raw_logprobs",
        "What log-probability fields hold: before (raw) or after (processed) masks, penalties and temperature.",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )
    generation_config: str = setting(
        "auto", "Default sampling parameters: 'auto' (the model's generation_config.json) or 'neutral'.",
        choices=("auto", "neutral"),
    )  # fmt: skip
    enforce_eager: bool = setting(
        False,
        "Run every step kernel by kernel; otherwise decode steps are recorded once and replayed, where that pays.",
    )
    chat_template: str | None = setting(None, "Chat template: inline Jinja or a path; default: the tokenizer's.")

    def __post_init__(self) -> None:
        if isinstance(self.quantization, str) and self.quantization in QUANTIZATIONS_NOT_YET:
            raise UnsupportedError(
                f"quantization={self.quantization!r} is known but not supported yet",
                hint="use int8 or int4 with an unquantized checkpoint: its weights are quantized while they are loaded",
                field="quantization",
            )
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Where weights come from."""

    load_format: str = setting(
        "auto",
        "'auto' and 'safetensors' read safetensors files; 'dummy' makes seeded random weights.",
        choices=("auto", "safetensors", "dummy"),
    )
    packing_cache: bool = setting(
        True, "Keep the weights as the native kernels want them on disk (QUIRE_CACHE_DIR), for faster starts."
    )
    download_dir: str | None = setting(None, "Directory for files from the hub; default: the hub client's cache.")

    def __post_init__(self) -> None:
        check_settings(self)
