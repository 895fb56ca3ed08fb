"""Publishing many tasks in one request, with one line of JSON per task and one line of JSON per result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response

from taskqueue_core.authoring.unsupported import field_checks
from taskqueue_core.errors import CapabilityMissing, InvalidInput
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Task
from taskqueue_server.api.models import ConfirmationOut, InvalidLine
from taskqueue_server.api.rights import demand_to_publish
from taskqueue_server.api.task_models import TaskIn
from taskqueue_server.problems import ProblemError
from taskqueue_server.routing import bodies
from taskqueue_server.routing.operations import Operation, RequestContext, Scope, spliced
from taskqueue_server.routing.parameters import IDEMPOTENCY_KEY, id_maker

MAX_LINES = 100 * LIMITS.batch
_PARENT = 2 * LIMITS.name + 64
"""maximum size in bytes of the name of a task as JSON"""
_LINE = LIMITS.payload + LIMITS.parents * _PARENT + 64 * 1024
"""maximum size of one line in bytes: a payload, parents, and 64 KiB for the task's other fields"""
_encoder = msgspec.json.Encoder()


async def publish(call: RequestContext) -> Response:
    """Publish many tasks. The response has one line per task, in the same order; empty lines are skipped.

    For an invalid line, the response has a line that describes the error, and the other tasks are published. If the
    whole request fails, some tasks may have been published: repeat the request with the same ids, or with the same
    ``Idempotency-Key`` and the same lines, because a task without an id is then identified by its line number.
    """
    batch = _Batch(call)
    async for line in _lines(call.stream(bodies.NDJSON)):
        await batch.add(line)
    await batch.flush()
    return spliced((line + b"\n" for line in batch.answers), bodies.NDJSON)


class _Batch:
    def __init__(self, call: RequestContext) -> None:
        self.answers: list[bytes] = []
        self._call = call
        self._id_of = id_maker(call)
        self._checks = field_checks(call.context.backend.capabilities)
        self._number = 0
        self._waiting: list[tuple[int, Task]] = []

    async def add(self, line: bytes | None) -> None:
        self._number += 1
        if self._number > MAX_LINES:
            detail = f"a batch may have at most {MAX_LINES} lines, 100 times the limit batch"
            raise ProblemError(413, "too_many", detail, headers={"connection": "close"})
        if line is None:
            self._refuse(
                "too_large", None, f"a line may have at most {_LINE} bytes (limit payload)"
            )
            return
        if not line.strip():
            return
        try:
            body = bodies.decode(TaskIn, line)
            task_id = self._id_of(body.key, body.id, self._number)
            task = body.to_task(self._call.context.backend.now(), task_id)
            for check in self._checks:
                check((task,))
            demand_to_publish(self._call, task)
        except ProblemError as error:
            problem = error.problem
            self._refuse(problem.code, problem.field, problem.detail)
        except InvalidInput as error:
            self._refuse(error.code, error.field, str(error))
        except CapabilityMissing as error:
            self._refuse(error.code, None, str(error))
        else:
            self._waiting.append((len(self.answers), task))
            self.answers.append(b"")
            if len(self._waiting) == LIMITS.batch:
                await self.flush()

    async def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        tasks = [task for _, task in waiting]
        if self._call.identity is not None:
            self._call.context.usage.spend(self._call.identity, len(tasks))
        confirmations = await self._call.context.queue.publish_many(tasks)
        for (index, _), confirmation in zip(waiting, confirmations, strict=True):
            self.answers[index] = _encoder.encode(ConfirmationOut.of(confirmation))
        # Let other asyncio tasks run here, because a call to an in-process store never yields to the event loop.
        await asyncio.sleep(0)

    def _refuse(self, code: str, field: str | None, detail: str) -> None:
        refusal = InvalidLine(line=self._number, code=code, field=field, detail=detail)
        self.answers.append(_encoder.encode(refusal))


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes | None]:
    """Yield the lines of the body; yield ``None`` in place of a line that is too long."""
    rest = bytearray()
    skipping = False
    async for chunk in chunks:
        head, *others = chunk.split(b"\n")
        if not skipping:
            rest += head
        for other in others:
            yield None if skipping or len(rest) > _LINE else bytes(rest)
            skipping = False
            rest = bytearray(other)
        if len(rest) > _LINE:
            skipping = True
            rest.clear()
    if rest or skipping:
        yield None if skipping else bytes(rest)


OPERATIONS = (
    Operation(
        "POST",
        "/v1/tasks/batch",
        publish,
        {200: (ConfirmationOut, InvalidLine)},
        id="batch_publish",
        verb="publish",
        scope=Scope.HANDLER,
        body=TaskIn,
        media_type=bodies.NDJSON,
        problems=(413,),
        headers=(IDEMPOTENCY_KEY,),
        tag="tasks",
        example={"key": "emails", "id": "order-4711", "payload": {"to": "a@example.org"}},
    ),
)
