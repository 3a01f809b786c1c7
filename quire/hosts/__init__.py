"""Programs that an engine runs under: each subpackage speaks the protocol of one, beside the HTTP server."""
