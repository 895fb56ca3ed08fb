"""The inference dispatcher, which sends jobs to GPU servers, one slot per job, on any backend with ``slots``."""
