"""A format of tool calls in each file."""
