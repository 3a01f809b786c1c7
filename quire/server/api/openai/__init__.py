"""OpenAI's completions and chat completions, and what servers report of themselves."""
