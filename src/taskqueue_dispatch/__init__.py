"""The inference dispatcher: sends jobs to GPU servers, one fenced slot per job, on any backend with ``slots``."""
