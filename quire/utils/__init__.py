"""Small helpers any layer may use: value checks, memory limits."""
