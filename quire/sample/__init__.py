"""From logits to tokens: masks, penalties, filters, a counter-based draw, log-probabilities. No scheduler, no model."""
