"""Grammars compiled off the engine's loop, within a budget: a cache over a pool of worker processes."""
