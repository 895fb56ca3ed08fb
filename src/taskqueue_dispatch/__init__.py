"""The inference dispatcher, which sends jobs to GPU servers. It needs a backend with the capability ``slots``."""
