"""The memory backend: volatile, in one process, and the readable reference of the contract."""

from taskqueue_memory.backend import MemoryBackend, create_backend
from taskqueue_memory.config import MemorySettings

__all__ = ["MemoryBackend", "MemorySettings", "create_backend"]
