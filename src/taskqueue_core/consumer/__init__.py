"""Consuming from a backend: settling, outages and maintenance. Server, worker, dispatcher and Prefect share it."""
