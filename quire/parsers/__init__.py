"""Parsers of what models write: calls of tools, and reasoning. Text in as it comes, events out; no torch."""
