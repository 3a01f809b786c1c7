"""vLLM's `transformers_utils`, of which there is `tokenizer` (`missing.ALIASES`)."""

from __future__ import annotations

__path__: list[str] = []  # a package, so that modules below it are looked for
