"""What is put in the place of what in Prefect's server, and whether that was done to the code that is known.

========================================== ====================================================================
``prefect.server.task_queue``              ``TaskQueue`` and ``MultiQueue``, before anything can have taken them
``prefect.server.models.task_workers``     ``task_worker_tracker``: who is connected, to any replica
``prefect.server.utilities.subscriptions`` ``still_connected``, for the sockets of task workers
``prefect.server.api.server``              ``create_app``: its applications open and close a `Host`
========================================== ====================================================================

The socket's handler, the orchestration and the API stay Prefect's own. They are the same, byte for byte, in many
releases: `faults` says where this one is of others.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from hashlib import sha256
from types import ModuleType
from typing import Any

__all__ = ["faults", "fingerprints", "replace"]

FINGERPRINTS = {
    "prefect.server.task_queue": "cd961a5d3b073e40",
    "prefect.server.api.task_runs.scheduled_task_subscription": "1f8aaf41903e091d",
    "prefect.server.models.task_workers": "f0198a7f47de59d4",
    "prefect.server.utilities.subscriptions.still_connected": "545a05bc6971edba",
}
"""of the source that is replaced, or relied on"""
_MARK = "taskqueue_stock"
_USERS = {
    "prefect.server.api.task_runs": ("TaskQueue", "MultiQueue"),
    "prefect.server.orchestration.core_policy": ("TaskQueue",),
}
"""who takes names from the queue's module"""


def replace(module: ModuleType) -> None:
    """Put what this package has in the place of what a module of Prefect has. Idempotent."""
    if hasattr(module, _MARK):
        return
    match module.__name__:
        case "prefect.server.task_queue":
            from taskqueue_prefect.task_queue import MultiQueue, TaskQueue

            setattr(module, _MARK, (module.TaskQueue, module.MultiQueue))
            module.TaskQueue, module.MultiQueue = TaskQueue, MultiQueue  # type: ignore[attr-defined]
            _rebind(module)
        case "prefect.server.models.task_workers":
            from taskqueue_prefect.worker_tracker import Workers

            setattr(module, _MARK, module.task_worker_tracker)
            module.task_worker_tracker = Workers(module.task_worker_tracker)  # type: ignore[attr-defined]
        case "prefect.server.utilities.subscriptions":
            setattr(module, _MARK, module.still_connected)
            module.still_connected = _listening(module.still_connected)  # type: ignore[attr-defined]
        case "prefect.server.api.server":
            setattr(module, _MARK, module.create_app)
            module.create_app = _hosting(module.create_app)  # type: ignore[attr-defined]


def _rebind(module: ModuleType) -> None:
    """Give the new classes to who has taken the old ones already: Prefect was imported before its plugins ran."""
    for name, names in _USERS.items():
        if (user := sys.modules.get(name)) is not None:
            for token in names:
                if hasattr(user, token):
                    setattr(user, token, getattr(module, token))


def _listening(still_connected: Callable[[Any], Awaitable[bool]]) -> Callable[[Any], Awaitable[bool]]:  # fmt: skip
    from taskqueue_prefect.delivery import SharedQueueDelivery

    @wraps(still_connected)
    async def listening(websocket: Any) -> bool:
        socket = SharedQueueDelivery.of_this_context()
        if socket is None:  # it is of somebody else: a stream of events, or of logs
            return await still_connected(websocket)
        return socket.is_connected(websocket)

    return listening


def _hosting(create_app: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create_app)
    def hosted(*args: Any, **more: Any) -> Any:
        app = create_app(*args, **more)
        if not getattr(app.state, _MARK, False):  # Prefect hands out the same one again
            setattr(app.state, _MARK, True)
            app.router.lifespan_context = _around(app.router.lifespan_context)
        return app

    return hosted


Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]


def _around(stock: Lifespan) -> Lifespan:
    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        from taskqueue_prefect.context import Host
        from taskqueue_prefect.lifespan import serving

        # before Prefect begins anything that a wrong setting would cut short
        host = Host.of_this_loop()
        async with stock(app) as state, serving(host, faults()):
            yield state

    return lifespan


def faults() -> list[str]:
    """Say what is wrong with a server as it is loaded now: nothing, if every task run goes through this package."""
    from taskqueue_prefect.task_queue import MultiQueue, TaskQueue

    ours = {"TaskQueue": TaskQueue, "MultiQueue": MultiQueue}
    matches = [
        f"{name}.{token} is Prefect's own"
        for name, names in {"prefect.server.task_queue": tuple(ours), **_USERS}.items()
        for token in names
        if name in sys.modules and getattr(sys.modules[name], token, None) is not ours[token]
    ]
    told = fingerprints()
    return matches + [
        f"{name} is another than the one that is known"
        for name in FINGERPRINTS
        if told.get(name) != FINGERPRINTS[name]
    ]


def fingerprints() -> dict[str, str]:
    """Return digests of the source in this process; of what is not imported there is none."""
    matches = {}
    for name in FINGERPRINTS:
        thing: object = sys.modules.get(name)
        if thing is None:
            module, _, token = name.rpartition(".")
            thing = getattr(sys.modules.get(module), token, None)
        if thing is not None:
            matches[name] = sha256(inspect.getsource(thing).encode()).hexdigest()[:16]  # type: ignore[arg-type]
    return matches
