"""The memory backend: volatile, in one process, and the readable reference of the contract."""

from taskqueue_memory.backend import MemoryBackend, MemorySettings, create_backend

__all__ = ["MemoryBackend", "MemorySettings", "create_backend"]
