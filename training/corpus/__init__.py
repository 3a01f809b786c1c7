"""Procedural, seeded corpus of `leaf`: one module per task, joined in registry.py."""
