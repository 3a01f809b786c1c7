"""Paged attention: the interface, what a step tells it, and the backends."""
