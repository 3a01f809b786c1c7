"""A format of thinking in each file."""
