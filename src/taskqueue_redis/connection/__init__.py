"""Connections to Redis: nodes, topologies, retries, errors and pub/sub."""
