"""The parts of Prefect's server that this package replaces, and a check that Prefect's source code is supported.

========================================== ====================================================================
``prefect.server.task_queue``              ``TaskQueue`` and ``MultiQueue``, also in modules that import them
``prefect.server.models.task_workers``     ``task_worker_tracker``: the workers connected to any replica
``prefect.server.utilities.subscriptions`` ``still_connected``, for the sockets of task workers
``prefect.server.api.server``              ``create_app``: its applications open and close a `Host`
========================================== ====================================================================

The socket's handler, the orchestration and the API remain Prefect's code. `faults` reports classes that were
not replaced, and parts of the installed release whose source code differs from the supported source code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial, wraps
from hashlib import sha256
from types import ModuleType
from typing import Any

FINGERPRINTS = {
    "prefect.server.task_queue": "cd961a5d3b073e40",
    "prefect.server.api.server.create_app": (
        "42b65f7bea37bca4 ca6733d813ee4ab4 125b9c02efdeffc3 "
        "b6f9eddbd32fc6c4 d25a4c191cfc4aca 0f896a78bc06a77c"
    ),
    "prefect.server.api.task_runs.scheduled_task_subscription": "1f8aaf41903e091d",
    "prefect.server.models.task_workers": "f0198a7f47de59d4",
    "prefect.server.utilities.subscriptions.still_connected": "545a05bc6971edba",
    "prefect.server.utilities.database.JSON": "067d49f34a775e09",
    "prefect.server.utilities.database.Pydantic": "65ee1657615c5cc1",
    "prefect.server.orchestration.core_policy.BackgroundTaskPolicy": "d6fc34670603fca3",
    "prefect.server.orchestration.core_policy.CoreTaskPolicy": "0b7012ba2c7afef9",
    "prefect.server.orchestration.core_policy.CopyScheduledTime": "4d65d5ddf6550ee4",
    "prefect.server.orchestration.core_policy.CopyTaskParametersID": "bd4c24f2e9da96cb",
    "prefect.server.orchestration.core_policy.EnqueueScheduledTasks": "54e79fa4641420d5",
    "prefect.server.orchestration.core_policy.PreventPendingTransitions": (
        "c762ce1540e70787 01e80528346a1558"
    ),
    "prefect.server.orchestration.core_policy.RetryFailedTasks": (
        "691fa309f184a27a 7b51908d101ab28e"
    ),
    "prefect.server.models.task_run_states.read_task_run_states": "2ef2ea71da4f2902",
    "prefect.server.models.task_runs.read_task_run": "0a3b7e37d7b0d06e",
    "prefect.server.models.task_runs.set_task_run_state": "0ac4a08366896384",
    "prefect.server.database.dependencies.provide_database_interface": (
        "9fa243dad6f68bf6 c476f647f089448e"
    ),
    "prefect.server.database.interface.PrefectDBInterface.Artifact": "f7b441a8ab033fdb",
    "prefect.server.database.interface.PrefectDBInterface.TaskRun": "e9ac8757fd84a83e",
    "prefect.server.database.interface.PrefectDBInterface.TaskRunState": "45dd1f19c5c10f6f",
    "prefect.server.database.interface.PrefectDBInterface.session": "209185fa613cd302",
    "prefect.server.database.interface.PrefectDBInterface.session_context": "165800ffdd624aed",
    "prefect.server.database.orm_models.Artifact": "0d8e581c08d11aea",
    "prefect.server.database.orm_models.Base": "9fadf259a3cb32f2",
    "prefect.server.database.orm_models.Run": "7daea5cbf0c4aaac",
    "prefect.server.database.orm_models.TaskRun": "104b0856d0b2fe8b 918b6772a0baf9f2",
    "prefect.server.database.orm_models.TaskRunState": "fc7ce0ff8c121398 8db68819db6aea09",
    "prefect.server.schemas.core.TaskRun": "4b34650785197fe9",
    "prefect.server.schemas.responses.SetStateStatus": "b65b32159f8d5af7",
    "prefect.server.schemas.states.State": "a71bce396f6b4c9b",
    "prefect.server.schemas.states.StateDetails": "55a6cbfe364f9153",
    "prefect.server.schemas.states.StateType": "4aa85af4c261336c",
}
"""digests of those parts of Prefect's source code that this package replaces or relies on; several separated by spaces
if the code differs between the supported releases, from the oldest to the newest"""
_REPLACED = "taskqueue_stock"
_IMPORTERS = {
    "prefect.server.api.task_runs": ("TaskQueue", "MultiQueue"),
    "prefect.server.orchestration.core_policy": ("TaskQueue",),
}
"""modules of Prefect, with the names that each of them imports from ``prefect.server.task_queue``"""


def replace(module: ModuleType) -> None:
    """Replace attributes of one of Prefect's modules with those of this package. Idempotent."""
    if hasattr(module, _REPLACED):
        return
    match module.__name__:
        case "prefect.server.task_queue":
            from taskqueue_prefect.task_queue import MultiQueue, TaskQueue

            setattr(module, _REPLACED, (module.TaskQueue, module.MultiQueue))
            module.TaskQueue, module.MultiQueue = TaskQueue, MultiQueue  # type: ignore[attr-defined]
            _rebind(module)
        case "prefect.server.models.task_workers":
            from taskqueue_prefect.worker_tracker import Workers

            setattr(module, _REPLACED, module.task_worker_tracker)
            module.task_worker_tracker = Workers(module.task_worker_tracker)  # type: ignore[attr-defined]
        case "prefect.server.utilities.subscriptions":
            setattr(module, _REPLACED, module.still_connected)
            module.still_connected = _wrap_still_connected(module.still_connected)  # type: ignore[attr-defined]
        case "prefect.server.api.server":
            setattr(module, _REPLACED, module.create_app)
            module.create_app = _wrap_create_app(module.create_app)  # type: ignore[attr-defined]


def _rebind(module: ModuleType) -> None:
    """Replace Prefect's classes in modules that imported them before the plugin was installed."""
    for name, names in _IMPORTERS.items():
        if (user := sys.modules.get(name)) is not None:
            for attribute in names:
                if hasattr(user, attribute):
                    setattr(user, attribute, getattr(module, attribute))


def _wrap_still_connected(
    still_connected: Callable[[Any], Awaitable[bool]],
) -> Callable[[Any], Awaitable[bool]]:
    from taskqueue_prefect.delivery import SharedQueueDelivery

    @wraps(still_connected)
    async def listening(websocket: Any) -> bool:
        socket = SharedQueueDelivery.of_this_context()
        if socket is None:
            # This websocket belongs to no worker, but transfers events or logs.
            return await still_connected(websocket)
        return socket.is_connected(websocket)

    return listening


def _wrap_create_app(create_app: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(create_app)
    def hosted(*args: Any, **more: Any) -> Any:
        app = create_app(*args, **more)
        if not getattr(app.state, _REPLACED, False):  # the application is not wrapped yet
            setattr(app.state, _REPLACED, True)
            stock = app.router.lifespan_context
            app.router.lifespan_context = asynccontextmanager(partial(_lifespan, stock))
        return app

    return hosted


async def _lifespan(stock: Callable[..., Any], app: Any) -> AsyncIterator[Any]:
    from taskqueue_prefect.context import Host
    from taskqueue_prefect.lifespan import serving

    # Read the settings before Prefect starts, so that an invalid setting stops the server early.
    host = Host.of_this_loop()
    async with stock(app) as state, serving(host, faults()):
        yield state


def faults() -> list[str]:
    """Return the reasons to doubt that the server uses this package for all task runs; empty if there are none."""
    from taskqueue_prefect.task_queue import MultiQueue, TaskQueue

    ours = {"TaskQueue": TaskQueue, "MultiQueue": MultiQueue}
    problems = [
        f"{name}.{attribute} is still Prefect's own"
        for name, names in {"prefect.server.task_queue": tuple(ours), **_IMPORTERS}.items()
        for attribute in names
        if name in sys.modules
        and getattr(sys.modules[name], attribute, None) is not ours[attribute]
    ]
    return problems + [
        f"{name} differs from the supported version"
        for name, supported in FINGERPRINTS.items()
        if _fingerprint(name) not in supported.split()
    ]


def _fingerprint(name: str) -> str:
    """Return a digest of the source code of a module, or of a part of a module; empty if it is not loaded."""
    found = _loaded(name)
    source = getattr(found, "fget", found)  # the function of a property
    return sha256(inspect.getsource(source).encode()).hexdigest()[:16] if source else ""


def _loaded(name: str) -> Any:
    """Return a module, or an attribute of a module or of a class in it; ``None`` if it is not loaded."""
    if not name or name in sys.modules:
        return sys.modules.get(name)
    owner, _, attribute = name.rpartition(".")
    return getattr(_loaded(owner), attribute, None)
