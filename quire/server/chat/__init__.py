"""The service behind the three APIs: prompts in, parsed outputs and streams out, in one internal form."""
