"""A second backend that commands in one process share: what a migration leaves."""

from tests.cli.shared import Shared

_current: list[Shared] = []


def renew() -> Shared:
    """Start anew and empty."""
    _current[:] = [Shared()]
    return _current[0]


def create_backend() -> Shared:
    """Return the present one."""
    return _current[0]
