"""The vocabulary both halves of the engine share: frozen messages, parameters, specs, records. No torch."""
