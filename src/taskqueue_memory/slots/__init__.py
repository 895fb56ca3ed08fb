"""The slot pool of the memory backend."""
