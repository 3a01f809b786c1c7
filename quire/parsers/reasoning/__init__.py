"""A format of reasoning in each file."""
