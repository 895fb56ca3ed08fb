"""Consuming from a backend: settling, outages and maintenance.

The server, the worker, the dispatcher and the Prefect plugin share this code.
"""
