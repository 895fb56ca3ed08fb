"""Settings of the memory backend: ``TASKQUEUE_MEMORY_…``."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["MemorySettings"]


class MemorySettings(BaseSettings):
    """What the memory backend can be told."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_MEMORY_", env_file=".env", extra="ignore"
    )

    journal: Path | None = None
    """append every transition to this file, one JSON object per line"""
