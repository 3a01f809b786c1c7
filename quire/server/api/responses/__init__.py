"""OpenAI's Responses API: one more form of a chat, with answers that are kept."""
