"""Files of requests in OpenAI's batch format: what `quire run-batch` is made of."""
