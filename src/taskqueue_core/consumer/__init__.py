"""Consuming from a backend: settlement, outages and maintenance. Servers, workers and plugins share this code."""
