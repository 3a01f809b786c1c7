"""What every route needs of HTTP: sockets, TLS, limits, API keys, tenants, tracing, errors."""
