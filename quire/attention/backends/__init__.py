"""Attention implementations, one file each; none imports another."""
