"""How processes that share a model find and tell each other things."""
