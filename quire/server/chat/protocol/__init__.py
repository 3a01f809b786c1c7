"""Requests as typed values. Validated once, here; ranges are those of `SamplingParams`."""
