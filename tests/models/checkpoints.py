"""Tiny random checkpoints in Hugging Face format, written by `transformers`, with a small tokenizer beside them.

Used by the tests of models and of the whole engine. Families: llama, llama3, mistral, qwen2, qwen3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "llama3", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 320
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Pages are gathered into a quire, and quires are bound into a book.",
    "How many tokens does this sentence have? One, two, three, four.",
    "Ein Satz mit Umlauten: äöü, ß und Emoji 🙂.",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
KINDS: dict[str, tuple[type[Any], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 40, "head_dim": 16}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
}


def make_checkpoint(
    family: str, directory: Path, *, seed: int = 0, max_shard_size: str = "10GB", std: float = 0.1, **overrides: Any
) -> PreTrainedModel:
    """Write a checkpoint and its tokenizer to `directory`, and return the float32 model that was written.

    Args:
        max_shard_size: small values, such as "40KB", give several files and an index.
        std: of the random weights; large enough that the logits are far from uniform.
        overrides: fields of the family's config.
    """
    config_class, model_class, family_fields = KINDS[family]
    config = config_class(**{**COMMON, **family_fields, **overrides}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, std)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    make_tokenizer(config.vocab_size).save_pretrained(directory)
    return model


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens, with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
