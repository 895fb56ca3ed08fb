"""Migrations under load, in which processes are killed at each step (A20; faults J1, J2, J5, J7)."""

import pytest

from taskqueue_core.migration import MigrationMode
from tests.flow.migrating import MemoryHome, migration


@pytest.mark.parametrize("mode", MigrationMode)
@pytest.mark.parametrize("seed", range(3))
async def test_the_equation_is_exact(seed: int, mode: MigrationMode) -> None:
    """A20, faults J1, J2, J5, J7: whichever process is killed, each task is on one backend and none is lost (law 1)."""
    story = await migration(seed, MemoryHome(), MemoryHome(), mode=mode)
    assert story.kills >= 4
    story.check()
