"""The steps that make up the slot pool's operations. After each step, every slot has at most one holder."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from taskqueue_core.authoring.slot_checks import Token
from taskqueue_core.capabilities import Endpoint, Permit
from taskqueue_core.clock import Clock
from taskqueue_memory.due_heap import DueHeap
from taskqueue_memory.room_signal import RoomNotifier
from taskqueue_memory.slots.leases import Lease, SlotPosition, SlotServer

_SWEPT = 1000
"""maximum number of expired leases that one sweep ends; the leases left for the next sweep are already invalid"""
_NOTES_PER_JOB = 8
_NOTES = 1000
_NOTE_BYTES = 16 * 1024 * 1024
_NOTE_SECONDS = 3600.0


class _Note(NamedTuple):
    key: tuple[str, str]
    """model and job"""
    at: float
    text: bytes


class LateNotes:
    """Notes that arrived after their job's lease had ended: the latest notes of each job, kept for an hour."""

    def __init__(self) -> None:
        self.notes: deque[_Note] = deque()
        """all notes, the oldest first"""

    def add(self, model: str, job: str, note: bytes, now: float) -> None:
        """Store a note, and delete the oldest notes if a limit is exceeded."""
        self._forget(now)
        of_job = [other for other in self.notes if other.key == (model, job)]
        if len(of_job) == _NOTES_PER_JOB:
            self.notes.remove(of_job[0])
        self.notes.append(_Note((model, job), now, note))
        size = sum(len(other.text) for other in self.notes)
        while len(self.notes) > _NOTES or size > _NOTE_BYTES:
            size -= len(self.notes.popleft().text)

    def of(self, model: str, job: str, now: float) -> tuple[bytes, ...]:
        self._forget(now)
        return tuple(note.text for note in self.notes if note.key == (model, job))

    def _forget(self, now: float) -> None:
        while self.notes and self.notes[0].at + _NOTE_SECONDS <= now:
            self.notes.popleft()


class Pool:
    """All endpoints and leases of one backend."""

    def __init__(self, clock: Clock) -> None:
        """Create an empty pool with a new epoch, which distinguishes its tokens from those of earlier pools."""
        self.clock = clock
        self.epoch, self.secret = secrets.token_hex(8), secrets.token_hex(32)
        self.servers: dict[str, SlotServer] = {}
        self.models: dict[str, dict[str, SlotPosition]] = {}
        """endpoints by model and server"""
        self.leases: dict[str, Lease] = {}
        """leases by token"""
        self.jobs: dict[tuple[str, str], Lease] = {}
        """leases by model and job"""
        self.late = LateNotes()
        self.signals = RoomNotifier(clock)
        self._fences = itertools.count(1)
        self._numbers = itertools.count(1)
        self._marks = itertools.count(1)
        self._ends = DueHeap[Lease](lambda lease, mark: lease.mark == mark)

    def position(self, model: str, server: str) -> SlotPosition | None:
        """Return the endpoint of a model on a server; None if it is not registered."""
        return self.models.get(model, {}).get(server)

    def put(self, endpoint: Endpoint) -> SlotPosition:
        """Add an endpoint, or update a registered one, which is then neither draining nor removed."""
        server = self.servers.setdefault(endpoint.server, SlotServer())
        position = server.positions.get(endpoint.model)
        if position is None:
            position = SlotPosition(endpoint, server, next(self._numbers))
            server.positions[endpoint.model] = position
            self.models.setdefault(endpoint.model, {})[endpoint.server] = position
        position.endpoint = endpoint
        position.draining = position.removed = False
        server.together = endpoint.together
        for lease in position.leases.values():
            self.expire_at(lease, lease.expires_at)
        return position

    def forget_if_done(self, position: SlotPosition) -> None:
        """Delete an endpoint that was removed, once it has no lease."""
        if not position.removed or position.leases:
            return
        model, name = position.endpoint.model, position.endpoint.server
        del position.server.positions[model]
        del self.models[model][name]
        if not self.models[model]:
            del self.models[model]
        if not position.server.positions:
            del self.servers[name]

    def grant(self, position: SlotPosition, holder: str, now: float, ttl: float) -> Lease:
        """Create a lease on an endpoint for ``ttl`` seconds."""
        fence = next(self._fences)
        lease = Lease(position, holder, self._token(fence), fence, now)
        last = position.server.last_model
        lease.switched = last not in (None, position.endpoint.model)
        self.leases[lease.token] = position.leases[lease.token] = lease
        self.expire_at(lease, now + ttl)
        return lease

    def expire_at(self, lease: Lease, until: float) -> None:
        """Set the time at which a lease expires."""
        lease.expires_at = until
        lease.mark = next(self._marks)
        self._ends.add(until, lease, lease.mark)

    def renumber(self, lease: Lease, shown: str) -> None:
        """Give a lease a new token and fence, so that an earlier holder can no longer use it."""
        del self.leases[lease.token], lease.position.leases[lease.token]
        lease.fence = next(self._fences)
        lease.token = self._token(lease.fence)
        lease.via, lease.missed = shown, None
        self.leases[lease.token] = lease.position.leases[lease.token] = lease

    def find(self, token: str, now: float) -> Lease | None:
        """Return the lease of a token; None if the token is unknown or the lease has ended."""
        lease = self.leases.get(token)
        if lease is not None and lease.expires_at <= now and lease.ends_by_time():
            self.run_out(lease, now)
            return None
        return lease

    def of_job(self, model: str, job: str, now: float) -> Lease | None:
        """Return the lease that is bound to a job; None if there is none."""
        lease = self.jobs.get((model, job))
        return lease and self.find(lease.token, now)

    def bind(self, lease: Lease, job: str) -> None:
        """Bind a lease to a job, and record the model as the server's last model."""
        position = lease.position
        lease.job, lease.state = job, Permit.ASSIGNED
        last = position.server.last_model
        lease.switched = last not in (None, position.endpoint.model)
        position.server.last_model = position.endpoint.model
        self.jobs[position.endpoint.model, job] = lease

    def end(self, lease: Lease) -> None:
        """End a lease, which frees its slot."""
        position = lease.position
        lease.mark = 0
        del self.leases[lease.token], position.leases[lease.token]
        if lease.job is not None:
            del self.jobs[position.endpoint.model, lease.job]
        self.forget_if_done(position)

    def clear(self, position: SlotPosition) -> None:
        """End the leases without a job, because the endpoint must not receive new jobs."""
        for lease in tuple(position.leases.values()):
            if lease.job is None:
                self.end(lease)

    def end_untold(self, lease: Lease, now: float) -> None:
        """End a lease without telling its holder. If the lease has a note, keep the note as a late note."""
        if lease.note is not None and lease.job is not None:
            self.late.add(lease.position.endpoint.model, lease.job, lease.note, now)
        self.end(lease)

    def run_out(self, lease: Lease, now: float) -> None:
        """End a lease that has expired, and notify waiting dispatchers of the free slot."""
        self.end_untold(lease, now)
        self.notify((lease.position,), now)

    def sweep(self, now: float) -> None:
        """End expired leases, except leases of jobs on servers that report their jobs: `reconcile` ends those."""
        for lease in tuple(self._ends.take(now, _SWEPT)):
            lease.mark = 0
            if lease.ends_by_time():
                self.run_out(lease, now)

    def notify(self, positions: Iterable[SlotPosition], now: float) -> None:
        """Notify the dispatchers that wait for a slot, for each model with a free slot on one of ``positions``.

        If a server has a limit across all models, its other endpoints are included.
        """
        models: set[str] = set()
        for position in positions:
            shared = position.server.together is not None
            near = position.server.positions.values() if shared else (position,)
            models |= {
                position.endpoint.model
                for position in near
                if position.may_give(now) and position.room > 0
            }
        for model in sorted(models):
            self.signals.notify(model)

    def _token(self, fence: int) -> str:
        return str(Token(self.epoch, fence, secrets.token_hex(16)))
