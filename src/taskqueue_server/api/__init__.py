"""Handlers of the HTTP API, and the table of its operations."""
