"""The workers connected to any replica. Replaces Prefect's tracker, which knows only the sockets of its own process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from taskqueue_prefect.context import Host
from taskqueue_prefect.delivery import SharedQueueDelivery
from taskqueue_prefect.enqueue import answer_in_time
from taskqueue_prefect.names import RECEIVER, client_of, spelling_of
from taskqueue_prefect.prefect_types import TaskWorkerResponse


class Workers:
    """A replacement for Prefect's tracker that reads the workers from the store. ``stock`` is Prefect's own tracker."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    async def observe_worker(self, task_keys: Sequence[str], worker_id: str) -> None:
        """Tell the handler of the worker's socket that the worker has sent a message.

        The message acknowledges the last run that the handler sent, if any.
        """
        socket = SharedQueueDelivery.of_this_context()
        if socket is not None:
            socket.observed(worker_id)
        else:
            await self._stock.observe_worker(list(task_keys), worker_id)

    async def forget_worker(self, worker_id: str) -> None:
        """Forget a worker. Do nothing in a socket's handler, which calls this after every run of a connected worker."""
        if SharedQueueDelivery.of_this_context() is None:
            await self._stock.forget_worker(worker_id)

    async def get_workers_for_task_keys(self, task_keys: Sequence[str]) -> list[TaskWorkerResponse]:
        """Return the workers that serve any of the tasks; all workers if ``task_keys`` is empty."""
        requested = set(task_keys)
        return [
            worker
            for worker in await self.get_all_workers()
            if not requested or requested & set(worker.task_keys)
        ]

    async def get_all_workers(self) -> list[TaskWorkerResponse]:
        """Return all workers with an open socket, on any replica. Raises HTTP 503 if the store is down."""
        from prefect.server.models import task_workers

        host = Host.of_this_loop()
        async with answer_in_time(host):
            workers = await host.control.workers()
        keys: dict[str, set[str]] = {}
        for connection in workers:
            if (client := client_of(connection.worker_id)) != RECEIVER:
                keys.setdefault(client, set()).update(connection.keys)
        # The current time is correct for all workers, because the store lists only workers that are connected.
        now = datetime.now(UTC)
        return [
            task_workers.TaskWorkerResponse(
                identifier=client,
                task_keys=sorted(map(spelling_of, names)),
                timestamp=now,  # pydantic converts the time to the type of this field
            )
            for client, names in keys.items()
        ]

    def reset(self) -> None:
        """Reset Prefect's tracker."""
        self._stock.reset()
