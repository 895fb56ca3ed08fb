"""The Redis backend: durable, shared by every process that uses the same Redis."""
