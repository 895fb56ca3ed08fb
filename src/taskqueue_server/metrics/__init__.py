"""Metrics for Prometheus, and the request log."""
