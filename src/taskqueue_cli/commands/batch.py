"""``taskqueue publish --batch``: publish a file of tasks, one JSON object per line."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import typer
from msgspec import Raw
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from taskqueue_cli.backends import with_backend
from taskqueue_cli.output import FAILED, console, note, print_json
from taskqueue_core.after import After, TaskRef
from taskqueue_core.backend import Backend
from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue, instant
from taskqueue_core.tasks import DEFAULT_PRIORITY, Published, Task, new_id
from taskqueue_core.uniqueness import UniqueKey

_MAX_PARENTS_BYTES = LIMITS.parents * (2 * LIMITS.name + 64)
_MAX_LINE_BYTES = LIMITS.payload + LIMITS.header_bytes + _MAX_PARENTS_BYTES + 16 * 1024
_BATCH = 500
_MAX_SHOWN = 20
_STORED = {Published.ACCEPTED.value, Published.DUPLICATE.value, Published.REPLACED.value}


class TaskFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a task to publish, from one line of a batch file or from command-line options."""

    key: str | None = None
    payload: Raw = msgspec.field(default_factory=lambda: Raw(b"null"))
    id: str | None = None
    headers: dict[str, str] = {}
    priority: int = DEFAULT_PRIORITY
    tenant: str | None = None
    ordering_key: str | None = None
    deadline: float | None = None
    not_before: float | None = None
    delay: float | None = None
    expires_in: float | None = None
    max_attempts: int | None = None
    tags: tuple[str, ...] = ()
    unique: UniqueKey | None = None
    content_digest: bytes | None = None
    after: After | None = None
    batch: TaskRef | None = None

    def to_task(self, now: float, key: str | None = None) -> Task:
        """Return the task. ``now`` is the store's time, and ``key`` the default key. Raises `InvalidInput`."""
        return Task(
            key=self.key or key or "",
            payload=bytes(self.payload),
            id=new_id() if self.id is None else self.id,
            headers=self.headers,
            priority=self.priority,
            tenant=self.tenant,
            ordering_key=self.ordering_key,
            deadline=instant(now, "expires_in", self.expires_in, "deadline", self.deadline),
            not_before=instant(now, "delay", self.delay, "not_before", self.not_before),
            max_attempts=self.max_attempts,
            tags=self.tags,
            unique=self.unique,
            content_digest=self.content_digest,
            after=self.after,
            batch=self.batch,
        )


_decoder = msgspec.json.Decoder(TaskFields)


class _BatchResult:
    """The number of lines with each outcome, and the reasons why lines were not stored."""

    def __init__(self) -> None:
        self.lines = 0
        self.statuses: Counter[str] = Counter()
        self.faults: list[dict[str, Any]] = []

    def count(self, line: int, status: str, detail: str | None) -> None:
        self.statuses[status] += 1
        if detail is not None and len(self.faults) < _MAX_SHOWN:
            self.faults.append({"line": line, "status": status, "detail": detail})

    def to_dict(self) -> dict[str, Any]:
        kinds = (*(status.value for status in Published), "invalid")
        counts = {name: self.statuses[name] for name in kinds}
        return {"lines": self.lines, **counts, "faults": self.faults}

    @property
    def stored(self) -> bool:
        return set(+self.statuses) <= _STORED


def publish_file(
    path: Path, key: str | None, server: str | None, *, wait: float, as_json: bool
) -> None:
    """Publish the valid lines of a file; exit with 1 unless every line is stored.

    If queues are full, wait for up to ``wait`` seconds in total.
    """
    result = _BatchResult()
    end = time.monotonic() + wait
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size or None
            with _progress(quiet=as_json) as progress:
                bar = progress.add_task("publishing", total=size)
                advance = lambda read: progress.update(bar, completed=read)  # noqa: E731 - short, and used only once
                with_backend(
                    server, lambda backend: _publish(backend, file, key, result, advance, end=end)
                )
    except OSError as error:
        got = f"a file that cannot be read ({error.strerror})"
        raise InvalidInput("batch", got, "a readable file, or - for stdin") from None
    if as_json:
        print_json(result.to_dict())
    else:
        _print(result)
    if not result.stored:
        raise typer.Exit(FAILED)


async def _publish(
    backend: Backend,
    file: BinaryIO,
    key: str | None,
    result: _BatchResult,
    advance: Callable[[int], None],
    *,
    end: float,
) -> None:
    read = 0
    await backend.health()  # a remote backend learns the server's time from its first response
    queue = Queue(backend)
    pending: list[tuple[int, Task]] = []
    for number, line in enumerate(_lines(file), start=1):
        read += len(line)
        if not line.strip():
            continue
        result.lines += 1
        try:
            pending.append((number, _task(line, key, backend.now())))
        except InvalidInput as error:
            result.count(number, "invalid", str(error))
        if len(pending) >= _BATCH:
            await _send(queue, pending, end, result)
            advance(read)
    await _send(queue, pending, end, result)
    advance(read)


async def _send(
    queue: Queue, pending: list[tuple[int, Task]], end: float, result: _BatchResult
) -> None:
    wait = max(0.0, end - time.monotonic())
    confirmations = await queue.publish_many((task for _, task in pending), wait=wait)
    for (number, _), confirmation in zip(pending, confirmations, strict=True):
        reason = confirmation.reason or confirmation.status.value
        result.count(number, confirmation.status.value, None if confirmation.stored else reason)
    pending.clear()


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(_MAX_LINE_BYTES):
        yield line
        while not line.endswith(b"\n") and len(line) == _MAX_LINE_BYTES:
            line = file.readline(_MAX_LINE_BYTES)  # skip the rest of a line that exceeds the limit


def _task(line: bytes, key: str | None, now: float) -> Task:
    try:
        return _decoder.decode(line).to_task(now, key)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        allowed = "one JSON object with the fields of a task"
        raise InvalidInput("line", f"an invalid line ({str(error)[:120]})", allowed) from None


def _progress(*, quiet: bool) -> Progress:
    bars = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    shown = not quiet and console.is_terminal
    return Progress(*bars, console=console, transient=True, disable=not shown)


def _print(result: _BatchResult) -> None:
    fields = result.to_dict()
    counts = (
        f"{fields[name]:,} {name}"
        for name in fields
        if name not in {"lines", "faults"} and fields[name]
    )
    mark = "[green]✔[/]" if result.stored else "[red]✘[/]"
    plural = "" if result.lines == 1 else "s"
    console.print(
        f"{mark} {result.lines:,} line{plural}: {', '.join(counts) or 'nothing to publish'}"
    )
    for fault in result.faults:
        note(f"line {fault['line']}: {fault['status']}: {fault['detail']}", "red")
    failed = sum(result.statuses[name] for name in ("invalid", "refused", "conflict"))
    if (hidden := failed - len(result.faults)) > 0:
        note(f"and {hidden:,} more", "red")
