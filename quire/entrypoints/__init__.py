"""What users touch in Python: the `LLM` class, and the flags that every command makes from its settings."""
