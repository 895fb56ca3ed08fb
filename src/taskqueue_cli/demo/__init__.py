"""The demo: it runs a server, workers and a job, causes failures on purpose, and prints a report at the end."""
