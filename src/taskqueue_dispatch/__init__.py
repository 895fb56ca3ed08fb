"""The inference dispatcher: jobs pushed to GPU servers, one fenced slot each, on any backend with ``slots``."""
