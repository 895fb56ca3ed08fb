"""A backend that commands in one process share: a memory backend that stays when a command closes it."""

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_memory import MemoryBackend


class Shared(MemoryBackend):
    """Says that processes can share it, which holds for commands that run in one."""

    capabilities = Capabilities(names=frozenset(Capability), shared=True)

    async def aclose(self) -> None:
        """Stay open for the next command."""


_current: dict[str, Shared] = {}


def renew(name: str = "store") -> Shared:
    """Start anew and empty."""
    _current[name] = Shared()
    return _current[name]


def create_backend() -> Shared:
    """Return the present one."""
    return _current["store"]


def create_old() -> Shared:
    """Return the one that a migration leaves."""
    return _current["old"]
