"""Prometheus metrics, under the names that dashboards for vLLM know, and Quire's own."""
