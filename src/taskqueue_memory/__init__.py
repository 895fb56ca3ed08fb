"""The memory backend: keeps tasks in one process, without persistence. It is the reference implementation."""

from taskqueue_memory.backend import MemoryBackend, MemorySettings, create_backend

__all__ = ["MemoryBackend", "MemorySettings", "create_backend"]
