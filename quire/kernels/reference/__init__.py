"""The slow, clear twin of every kernel, in plain torch. Tests compare every other implementation with these."""
