"""The OpenAI-compatible HTTP server. It knows the engine by `quire.engine.protocol.EngineClient` alone."""
