"""Where workers run: one file per kind of executor."""
