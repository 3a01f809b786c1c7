"""Text to token ids and back: tokenizers, incremental decoding, chat templates. No torch, no transformers."""
