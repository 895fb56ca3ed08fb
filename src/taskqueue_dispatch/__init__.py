"""The inference dispatcher, which sends jobs to GPU servers. A job occupies a slot. The backend must have ``slots``."""
