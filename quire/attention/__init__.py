"""Paged attention: the interface, the metadata of a step, and the backends."""
