"""Anthropic's Messages API, around the same `ChatRequest` and the same answers as chats."""
