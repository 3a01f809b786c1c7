"""Who runs in each step, on which blocks, and when a request ends. Control plane: no torch."""
