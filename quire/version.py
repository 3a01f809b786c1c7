"""The version of Quire, read by packaging, ``quire --version`` and logs."""

__version__ = "0.1.0"
