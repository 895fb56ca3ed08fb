"""Prefect in an environment of its own, and a real Redis."""

from __future__ import annotations

import pytest

from tests.prefect.environment import python_with_prefect
from tests.redis.conftest import (
    engines,
    redis_prefix,
    redis_server,
    redis_url,
    shared_servers,
)

__all__ = ["engines", "redis_prefix", "redis_server", "redis_url", "shared_servers"]


@pytest.fixture(scope="session")
def prefect_python() -> str:
    """An interpreter that has Prefect."""
    return python_with_prefect()
