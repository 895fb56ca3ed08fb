"""The publisher, which sends batches of tasks as NDJSON (one JSON object per line), without decoding payloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Raw

from taskqueue_core.authoring.helpers import check_size
from taskqueue_core.errors import CapabilityMissing, PublishUnconfirmed, TaskQueueError
from taskqueue_core.limits import LIMITS, clean_traceback
from taskqueue_core.protocol.frames import WireTask, to_wire_task
from taskqueue_core.tasks import Confirmation, Delivery, Published, Refusal, Task
from taskqueue_remote.client import NDJSON, REPEAT, HttpClient

_CHUNK_BYTES = 8 * 1024 * 1024
_UNREADABLE = f"the server's response cannot be read: {REPEAT}"


class _Retry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    task: WireTask
    at: float
    error: str | None = None
    token: str | None = None
    free: bool = False
    traceback: str | None = None


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the response to a batch: the confirmation of a task, or the reason why the task is invalid."""

    status: str
    key: str | None = None
    task_id: str | None = None
    position: int | None = None
    reason: str | None = None
    retry_after: float | None = None
    depth: int | None = None
    existing_id: str | None = None
    code: str | None = None
    field: str | None = None
    detail: str | None = None


_CODES: Mapping[str | None, Refusal] = {code.value: code for code in Refusal}
_STATUSES: Mapping[str, Published] = {status.value: status for status in Published}
_decoder = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()
_confirmation = msgspec.json.Decoder(Confirmation)


class RemotePublisher:
    """The publisher of the server's backend. Each call sends HTTP requests.

    A cancelled call may have published its tasks. If it is repeated with the same task ids, each task is stored once.
    """

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        """Publish tasks in one or more requests of limited size. A task that the server finds invalid is refused.

        If a request after the first fails, `PublishUnconfirmed` is raised, because the earlier requests stored tasks.
        """
        check_size("tasks", tasks)
        confirmations: list[Confirmation] = []
        for lines in _chunks(tasks):
            chunk = tasks[len(confirmations) : len(confirmations) + len(lines)]
            try:
                confirmations += await self._publish(chunk, lines)
            except TaskQueueError as error:
                if not confirmations:
                    raise
                raise PublishUnconfirmed(
                    f"{error}; some tasks of the call were stored: publish all again with the same ids"
                ) from error
        return tuple(confirmations)

    async def _publish(self, tasks: Sequence[Task], lines: Sequence[bytes]) -> list[Confirmation]:
        answer = await self._client.post_once("/v1/tasks/batch", b"\n".join(lines), NDJSON)
        if not answer.ok:
            raise self._client.error(answer)
        return _confirmations(tasks, answer.body)

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
        free: bool = False,
        traceback: str | None = None,
    ) -> Confirmation:
        """Schedule the next attempt of a task. After `PublishUnconfirmed`, repeat the call with the same token.

        A task that the server does not know is published instead, and may be refused. A task whose first attempt has
        not begun is not changed, and the status is ``duplicate``.
        Raises `CapabilityMissing` if ``settles`` is given, because this backend has no deliveries.
        """
        if settles is not None:
            raise CapabilityMissing(
                "the server backend cannot settle a delivery: only the worker that has the delivery can"
            )
        retry = _Retry(
            task=to_wire_task(task),
            at=at,
            error=error,
            token=token,
            free=free,
            traceback=clean_traceback(traceback),
        )
        answer = await self._client.post_once("/v1/retries", _encoder.encode(retry))
        try:
            return _confirmation.decode(answer.body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if not answer.ok:
                raise self._client.error(answer) from None
            raise PublishUnconfirmed(_UNREADABLE, task_id=task.id) from None


def _chunks(tasks: Sequence[Task]) -> Iterator[list[bytes]]:
    lines: list[bytes] = []
    size = 0
    for task in tasks:
        line = _line(task)
        if lines and (len(lines) >= LIMITS.batch or size + len(line) >= _CHUNK_BYTES):
            yield lines
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield lines


def _line(task: Task) -> bytes:
    wire = to_wire_task(task)
    payload = task.payload
    if b"\n" in payload or b"\r" in payload:
        # A line break in JSON can only be whitespace between values, but in NDJSON it would end the line.
        space = bytes.maketrans(b"\r\n", b"  ")
        wire = msgspec.structs.replace(wire, payload=Raw(payload.translate(space)))
    return _encoder.encode(wire)


def _confirmations(tasks: Sequence[Task], body: bytes) -> list[Confirmation]:
    lines = [line for line in body.split(b"\n") if line.strip()]
    if len(lines) != len(tasks):
        raise PublishUnconfirmed(
            f"the server confirmed {len(lines)} of {len(tasks)} tasks: {REPEAT}",
            task_id=tasks[0].id,
        )
    return [_read(task, line) for task, line in zip(tasks, lines, strict=True)]


def _read(task: Task, line: bytes) -> Confirmation:
    try:
        decoded = _decoder.decode(line)
        if decoded.status == "invalid":
            return Confirmation(
                key=task.key,
                task_id=task.id,
                status=Published.REFUSED,
                reason=f"{decoded.code or 'invalid'}: {decoded.detail or decoded.field or 'no detail'}",
            )
        if (decoded.key, decoded.task_id) != (task.key, task.id):
            raise PublishUnconfirmed(_UNREADABLE, task_id=task.id)
        return Confirmation(
            key=task.key,
            task_id=task.id,
            status=_STATUSES[decoded.status],
            position=decoded.position,
            code=_CODES.get(decoded.code),
            reason=decoded.reason,
            retry_after=decoded.retry_after,
            depth=decoded.depth,
            existing_id=decoded.existing_id,
        )
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise PublishUnconfirmed(_UNREADABLE, task_id=task.id) from error
