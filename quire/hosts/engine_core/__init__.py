"""vLLM's EngineCore protocol (ZeroMQ, msgpack): this engine as the core behind a front end of vLLM's."""
