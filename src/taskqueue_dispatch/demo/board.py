"""What a run shows at one moment: slots by server, and where the jobs of each model are."""

from __future__ import annotations

import msgspec

from taskqueue_core.capabilities import EndpointInfo, PoolView
from taskqueue_core.tasks import Ledger

__all__ = ["Board", "Line", "Rack", "racks_of", "state_of"]


class Rack(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one endpoint, by state. Their sum may be more than its slots where some were taken away."""

    model: str
    server: str
    free: int
    unassigned: int = 0
    running: int = 0
    detached: int = 0
    overdue: int = 0
    state: str = ""
    """why it gets no jobs; nothing where it does"""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs of one model."""

    name: str
    jobs: int
    ledger: Ledger
    retried: int = 0
    redelivered: int = 0

    @property
    def queued(self) -> int:
        """Those that wait, for a slot or for their next attempt."""
        return self.ledger.waiting + self.ledger.scheduled

    @property
    def ended(self) -> int:
        """Those that are done or have failed."""
        return self.ledger.done + self.ledger.dead


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    racks: tuple[Rack, ...]
    lines: tuple[Line, ...]
    callbacks: int = 0
    """delivered so far"""


def _rack_of(info: EndpointInfo, name: str, now: float) -> Rack:
    """Return the slots of an endpoint. ``name`` is its model's, as it is shown."""
    overdue = min(info.overdue, info.assigned)
    return Rack(
        model=name,
        server=info.endpoint.server,
        free=info.free,
        unassigned=info.unassigned,
        running=info.assigned - overdue,
        detached=info.detached,
        overdue=overdue,
        state=state_of(info, now),
    )


def state_of(info: EndpointInfo, now: float) -> str:
    """Return why an endpoint gets no jobs, in a word: nothing where it does."""
    if info.removed:
        return "removed"
    if info.draining:
        return "draining"
    if not info.healthy:
        return "not healthy"
    if info.resting_until is not None and info.resting_until > now:
        return "resting"
    return ""


def racks_of(view: PoolView, names: dict[str, str], now: float) -> tuple[Rack, ...]:
    """Return the endpoints of models, by the server's name."""
    racks = [
        _rack_of(info, names[info.endpoint.model], now)
        for info in view.endpoints
        if info.endpoint.model in names
    ]
    return tuple(sorted(racks, key=lambda rack: (rack.server, rack.model)))
