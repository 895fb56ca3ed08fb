"""The journal: every transition as one line of JSON, for the data pipeline.

Fields of version 2, in this order: ``v``, ``run`` (random, one per start of the process), ``seq``
(from 1 without gaps within a run), ``ts`` (Unix seconds), ``event``, ``key``, ``task_id``,
``attempt``, ``losses``, ``state`` (after the event), ``priority``, ``tenant``, ``worker``,
``error`` (of the attempt that failed), ``reason`` (of a dead letter), ``ordering_key``, ``due_at``
(of a task that is for later: Unix seconds).

Events: published, available, delivered, acked, redelivered, lost, retried, dead_lettered, redriven,
discarded, expired, cancelled; and configured, of no task, whose ``reason`` is the queue's settings as JSON.
"""

from __future__ import annotations

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
    """One transition."""

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


class MemoryJournal:
    """Appends lines, each by one write, so that a killed process leaves whole lines."""

    def __init__(self, path: Path) -> None:
        """Open (or create, readable by the owner alone) the file. Raises `ConfigurationError` if it can't be."""
        self._run = secrets.token_hex(4)
        self._seq = 0
        self._torn = False
        self.failed = False
        """a write failed: lines are missing from there on, which a reader sees by the gap in ``seq``"""
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
        """Append one transition. A full disk stops the journal's growth, never the queue's work."""
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
        """Append that a queue has other settings."""
        self._append(
            ts=now, event="configured", key=key, task_id="", attempt=0, losses=0, state="", priority=0, tenant=None,
            worker=None, error=None, reason=settings.model_dump_json(), ordering_key=None, due_at=None,
        )  # fmt: skip

    def _append(self, **fields: Any) -> None:
        self._seq += 1
        line = JournalLine(run=self._run, seq=self._seq, **fields)
        data = _encoder.encode(line) + b"\n"
        try:
            if self._torn:  # so that what came through of that line does not spoil this one
                data = b"\n" + data
            written = os.write(self._file, data)
        except OSError as refusal:
            self._fail(refusal)
        else:
            self._torn = written < len(data)
            if self._torn:
                self._fail(OSError("a line was written only in part"))

    def close(self) -> None:
        """Close the file. Idempotent; what is written after is lost."""
        if self._file != _CLOSED:
            os.close(self._file)
            self._file = _CLOSED  # the number may be given to another file

    def _fail(self, error: OSError) -> None:
        if not self.failed:
            self.failed = True
            _log.error("cannot write the journal (%s); it has gaps from here on", error)


def variables(path: Path) -> Mapping[str, str]:
    """Have the server write into the file."""
    return {"TASKQUEUE_MEMORY_JOURNAL": str(path)}


async def keep_journal(key: str, path: Path, since: float, store: Mapping[str, str]) -> None:
    """Do nothing: it is there."""
