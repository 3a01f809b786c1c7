"""The front-end's ends of the line to an engine core: one file per way of running it."""
