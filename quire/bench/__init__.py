"""A load generator for OpenAI-compatible servers: what `quire bench serve` is made of."""
