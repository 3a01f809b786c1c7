"""Parsers of what models write: calls of tools, and thinking. Text in as it comes, events out; no torch."""
