"""What users touch: the `LLM` class and the command line."""
