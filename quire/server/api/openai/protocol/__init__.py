"""Requests that only the OpenAI API has."""
