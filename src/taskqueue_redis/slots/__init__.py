"""The slot pool of the Redis backend."""
