"""The page in a browser: `make test-page`."""
