"""An engine that computes nothing: an executor plugin whose steps give fixed tokens at a fixed pace."""
