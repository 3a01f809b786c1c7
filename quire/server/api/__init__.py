"""The APIs: each translates its requests into the internal form and writes its own responses."""
