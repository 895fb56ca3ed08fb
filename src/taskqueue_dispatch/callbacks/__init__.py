"""Callbacks: signed requests that report the end of a job to its client, sent as tasks of their own queue."""
