"""A memory backend that several commands in one process share, and that stays open when one of them closes it."""

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_memory import MemoryBackend


class Shared(MemoryBackend):
    """A memory backend that claims to be shared between processes, which is true for commands in one process."""

    capabilities = Capabilities(names=frozenset(Capability), shared=True)

    async def aclose(self) -> None:
        """Do nothing, because the next command still needs the backend."""


_current: dict[str, Shared] = {}


def renew(name: str = "store") -> Shared:
    """Create a new empty store with this name."""
    _current[name] = Shared()
    return _current[name]


def create_backend() -> Shared:
    """Return the current store."""
    return _current["store"]


def create_old() -> Shared:
    """Return the store from which a migration moves tasks away."""
    return _current["old"]
