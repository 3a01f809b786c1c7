"""The simulator: the real scheduler and page manager under a virtual clock, with a model of what steps cost."""
