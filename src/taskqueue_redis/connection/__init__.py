"""Connections to Redis: nodes, topologies, retries, errors, pub/sub."""
