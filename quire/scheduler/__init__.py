"""Who runs in each step, on which pages, and when a request ends. Control plane: no torch."""
