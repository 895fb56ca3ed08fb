"""The journal of the memory backend: a file with one line of JSON per state change, for the data pipeline.

Fields of version 2, in this order: ``v``, ``run`` (random, one per start of the process), ``seq``
(from 1 without gaps within a run), ``ts`` (Unix seconds), ``event``, ``key``, ``task_id``,
``attempt``, ``losses``, ``state`` (after the event), ``priority``, ``tenant``, ``worker``,
``error`` (of the attempt that failed), ``reason`` (of a dead letter), ``ordering_key``, ``due_at``
(of a scheduled task: when it becomes available, Unix seconds).

Events: published, available, delivered, acked, redelivered, lost, retried, rescheduled, replaced, released,
dead_lettered, redriven, discarded, expired, cancelled. The event ``configured`` has no task; its ``reason`` holds the
queue's settings as JSON.

With digests, each line has a last field ``digest``, which depends on the line and on the digest before it, and closing
the journal appends an end mark, the event ``closed``. The audit then finds a line that was changed, removed or
renumbered, and a cut.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import ConfigurationError
from taskqueue_memory.records import TaskRecord

JOURNAL_VERSION = 2
_CLOSED = -1
_log = logging.getLogger("taskqueue.memory")
_encoder = msgspec.json.Encoder()


class JournalLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the journal: one state change of a task, or new settings of a queue."""

    v: int = JOURNAL_VERSION
    run: str
    seq: int
    ts: float
    event: str
    key: str
    task_id: str
    attempt: int
    losses: int
    state: str
    priority: int
    tenant: str | None
    worker: str | None
    error: str | None
    reason: str | None
    ordering_key: str | None
    due_at: float | None


_CHANGE = (
    "event", "key", "state", "worker", "reason", "task_id", "attempt", "losses", "priority", "tenant", "ordering_key",
    "due_at", "error",
)  # fmt: skip
"""fields that the digest covers, after the number and the time"""


def digest_of(before: str, line: JournalLine) -> str:
    """Return the digest of a line. ``before``: the digest of the line before; for the first line of a run, the run.

    The journal of the Redis backend has the same digests. They have no key, so they need no collision resistance.
    """
    values = [getattr(line, name) for name in _CHANGE]
    if line.due_at is not None:
        values[-2] = round(line.due_at * 1e6)
    texts = ("" if value is None else str(value) for value in values)
    text = "\0".join((before, str(line.seq), str(round(line.ts * 1e6)), *texts))
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class MemoryJournal:
    """A journal file. Each line is appended with a single write, so that a killed process leaves no partial line."""

    def __init__(self, path: Path, *, digests: bool = False) -> None:
        """Open the file, or create it so that only its owner can read it. Raises `ConfigurationError` on failure."""
        self._digests = digests
        self._run = secrets.token_hex(4)
        self._digest = self._run
        self._seq = 0
        self._last = 0.0
        self._torn = False
        self.failed = False
        """whether a write has failed; readers detect the missing lines by gaps in ``seq``"""
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(
                f"TASKQUEUE_MEMORY_JOURNAL: cannot open the file for appending: {error.strerror}"
            ) from error

    def write(
        self,
        event: str,
        record: TaskRecord,
        now: float,
        *,
        worker: str | None,
        error: str | None,
        due_at: float | None,
    ) -> None:
        """Append a state change. A failed write is logged once and does not stop the queue."""
        self._append(
            ts=now,
            event=event,
            key=record.task.key,
            task_id=record.task.id,
            attempt=record.attempt,
            losses=record.losses,
            state=str(record.state),
            priority=record.task.priority,
            tenant=record.task.tenant,
            worker=worker,
            error=error,
            reason=record.reason,
            ordering_key=record.task.ordering_key,
            due_at=due_at,
        )

    def write_settings(self, key: str, settings: QueueSettings, now: float) -> None:
        """Append the event ``configured`` with a queue's new settings."""
        self._append_event("configured", now, key, settings.model_dump_json())

    def _append_event(
        self, event: str, now: float, key: str = "", reason: str | None = None
    ) -> None:
        """Append an event that has no task."""
        self._append(
            ts=now, event=event, key=key, task_id="", attempt=0, losses=0, state="", priority=0, tenant=None,
            worker=None, error=None, reason=reason, ordering_key=None, due_at=None,
        )  # fmt: skip

    def _append(self, **fields: Any) -> None:
        self._seq += 1
        line = JournalLine(run=self._run, seq=self._seq, **fields)
        data = _encoder.encode(line)
        self._last = line.ts
        if self._digests:
            self._digest = digest_of(self._digest, line)
            data = b'%b,"digest":"%b"}' % (data[:-1], self._digest.encode())
        data += b"\n"
        try:
            if self._torn:  # end the incomplete line, so that the new line can be parsed
                data = b"\n" + data
            written = os.write(self._file, data)
        except OSError as refusal:
            self._fail(refusal)
        else:
            self._torn = written < len(data)
            if self._torn:
                self._fail(OSError("a line was written only in part"))

    def close(self) -> None:
        """Close the file. Idempotent; lines that are written afterwards are lost."""
        if self._file != _CLOSED:
            if self._digests and self._seq:
                self._append_event("closed", self._last)
            os.close(self._file)
            self._file = _CLOSED  # the system may give this file descriptor to another file

    def _fail(self, error: OSError) -> None:
        if not self.failed:
            self.failed = True
            _log.error("cannot write to the journal (%s); from now on, lines may be missing", error)


def variables(path: Path) -> Mapping[str, str]:
    """Return the environment variables that make a server write its journal to ``path``."""
    return {"TASKQUEUE_MEMORY_JOURNAL": str(path)}


async def keep_journal(key: str, path: Path, since: float, store: Mapping[str, str]) -> None:
    """Do nothing, because the server has already written the journal."""
