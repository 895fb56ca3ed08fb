"""The server of a run: its store, the dispatcher in it, and who receives callbacks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import msgspec
import uvicorn
from pydantic import SecretStr
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from taskqueue_cli.backends import embedded_store
from taskqueue_cli.demo.cluster import DemoFailed
from taskqueue_core.assembly import open_backend
from taskqueue_core.capabilities import control_of, slots_of
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.retry import RetryPolicy
from taskqueue_dispatch.api import extension
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.demo.plan import DemoOptions
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.process.serve import ServerProcess

_REFUSES = 10
"""one in so many is refused the first time"""


class _CallbackBody(msgspec.Struct, frozen=True):
    job_id: str
    status: str


class Receiver:
    """An application, and what came to it."""

    def __init__(self, secret: str) -> None:
        self._webhook = Webhook(secret)
        self.ended: dict[str, str] = {}
        """how each job has ended, by its id, as a callback that was accepted has said"""
        self.refused: set[str] = set()
        """ids of the callbacks that were refused on purpose"""
        self.forged = 0
        self._seen = 0
        self.app = Starlette(routes=[Route("/done", self._receive, methods=["POST"])])

    async def _receive(self, request: Request) -> Response:
        body = await request.body()
        try:
            self._webhook.verify(body, dict(request.headers))
            decoded = msgspec.json.decode(body, type=_CallbackBody)
        except (WebhookVerificationError, msgspec.MsgspecError):
            self.forged += 1
            return Response(status_code=400)
        callback = request.headers["webhook-id"]
        self._seen += 1
        if self._seen % _REFUSES == 1 and callback not in self.refused:
            self.refused.add(callback)
            return Response(status_code=503)
        self.ended[decoded.job_id] = decoded.status
        return Response(status_code=204)


_HOST = "127.0.0.1"
_ENDS = 15.0
_RETRY = RetryPolicy(base=0.2, cap=1.0)
"""of callbacks: a run is over before the usual one tries again"""


class DemoServer(msgspec.Struct, frozen=True, kw_only=True):
    """What a run works with."""

    url: str
    backend: InstrumentedBackend
    dispatcher: Dispatcher
    receiver: Receiver
    callback_url: str


@contextlib.asynccontextmanager
async def opened(options: DemoOptions) -> AsyncIterator[DemoServer]:
    """Start all of it in this event loop, and end it. Whoever entered it is cancelled when the server ends by itself.

    Raises `ConfigurationError`, and `DemoFailed` where a dispatcher works at the store already.
    """
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    receiver = Receiver(secret)
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(_received(receiver))
        if options.embedded:
            stack.enter_context(_store(options.backend))
        settings = _settings(options.port)
        backend = open_backend(options.backend, settings)
        await _demand_for_itself(backend)
        server = ServerProcess(
            backend, settings, extensions=[extension(_dispatching(secret, port))]
        )
        await stack.enter_async_context(_serving(server))
        context = server.context
        if context is None or not isinstance(
            result := context.extension_state["dispatch"], Dispatcher
        ):
            raise DemoFailed("the server has no dispatcher")
        yield DemoServer(
            url=server.url,
            backend=context.backend,
            dispatcher=result,
            receiver=receiver,
            callback_url=f"http://{_HOST}:{port}/done",
        )


def _settings(port: int) -> Settings:
    """Return the settings of a server for this machine alone, that everybody there may use."""
    alone = {
        "host": _HOST,
        "port": port,
        "processes": 1,
        "extensions": frozenset(),
        "tokens_file": None,
        "tls_certificate": None,
        "tls_key": None,
        "drain": 0.5,
    }
    return load_settings(Settings).model_copy(update=alone)


def _dispatching(secret: str, port: int) -> DispatchSettings:
    """Return settings of a hurry; callbacks may go to this machine, over http, which they else may not."""
    return DispatchSettings(
        lease=3.0,
        safety_pass=0.5,
        health_interval=0.4,
        settled=0.5,
        partition=3.0,
        drain=0.5,
        breaker_rest=0.5,
        busy_rest=0.1,
        endpoints_allowed=("127.0.0.0/8",),
        webhook_secrets=(SecretStr(secret),),
        callback_http=True,
        callback_ports=(port,),
        callback_networks=("127.0.0.0/8",),
        callbacks_per_host=16,
    )


@contextlib.contextmanager
def _store(name: str) -> Iterator[None]:
    """Run a store for the backend, in a folder that goes with it."""
    store = embedded_store(name)
    if store is None:
        raise DemoFailed(f"there is no embedded {name} in this installation")
    folder = Path(tempfile.mkdtemp(prefix="taskqueue-demo-"))
    try:
        with store.run(folder / "store") as (_, variables):
            before = {name: os.environ.get(name) for name in variables}
            os.environ.update(variables)
            try:
                yield
            finally:
                for key, value in before.items():
                    if value is None:
                        del os.environ[key]
                    else:
                        os.environ[key] = value
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _demand_for_itself(backend: InstrumentedBackend) -> None:
    """Raise `DemoFailed` where a dispatcher's things are in the store: the run would send others' callbacks."""
    pool, control = slots_of(backend), control_of(backend)
    ledger = (await control.stats(CALLBACKS)).ledger
    if (await pool.inspect()).endpoints or ledger.waiting + ledger.scheduled + ledger.in_flight:
        await backend.aclose()
        raise DemoFailed(
            "a dispatcher works at this store, and the demo would take its callbacks: "
            "choose another store, or --backend embedded",
            exit_code=2,
        )
    settings = await control.settings(CALLBACKS)
    await control.configure(CALLBACKS, settings.model_copy(update={"retry": _RETRY}))


@contextlib.asynccontextmanager
async def _serving(server: ServerProcess) -> AsyncIterator[None]:
    """Run the server. A signal is the server's, which begins to drain: then whoever entered this is cancelled."""
    serving, ready = asyncio.create_task(server.run()), asyncio.create_task(server.ready.wait())
    leaving = asyncio.create_task(_leaving(server, ready))
    own = asyncio.current_task()

    def gone(_: object) -> None:
        if own is not None:
            own.cancel()

    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise asyncio.CancelledError
        serving.add_done_callback(gone)
        leaving.add_done_callback(gone)
        try:
            yield
        except Exception:
            if leaving.done():  # it failed for want of the server
                raise asyncio.CancelledError from None
            raise
        finally:
            serving.remove_done_callback(gone)
            leaving.remove_done_callback(gone)
    finally:
        ready.cancel()
        leaving.cancel()
        server.stop_once()  # a second time would cut short what the signal began, and the store goes next
        done, _ = await asyncio.wait({serving}, timeout=_ENDS)
        if not done:
            server.stop()
            await asyncio.wait({serving})


async def _leaving(server: ServerProcess, ready: asyncio.Task[bool]) -> None:
    await asyncio.wait({ready})
    if server.context is not None:
        await server.context.draining.wait()


@contextlib.asynccontextmanager
async def _received(receiver: Receiver) -> AsyncIterator[int]:
    """Have the receiver listen, and tell its port."""
    with socket.create_server((_HOST, 0), backlog=256) as listener:
        program = _Program(
            uvicorn.Config(
                receiver.app, http="h11", ws="none", lifespan="off", log_config=None,
                access_log=False, server_header=False, timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        serving = asyncio.create_task(program.serve([listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            program.should_exit = True
            await asyncio.wait({serving})


class _Program(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # they are the run's
