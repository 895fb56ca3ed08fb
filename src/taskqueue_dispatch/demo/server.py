"""The server of a demo run, with its store and dispatcher, and the receiver of callbacks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Generator

import msgspec
import uvicorn
from pydantic import SecretStr
from standardwebhooks import Webhook, WebhookVerificationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from taskqueue_cli.backends import run_embedded
from taskqueue_cli.demo_frame.run import DemoFailed
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

_REFUSE_ONE_IN = 10
"""the receiver refuses one callback of this many, at its first attempt"""


class _CallbackBody(msgspec.Struct, frozen=True):
    job_id: str
    status: str


class Receiver:
    """The ASGI application that receives callbacks and checks their signatures."""

    def __init__(self, secret: str) -> None:
        self._webhook = Webhook(secret)
        self.ended: dict[str, str] = {}
        """the final status of each job by id, according to the accepted callbacks"""
        self.refused: set[str] = set()
        """ids of the callbacks that were refused once on purpose"""
        self.forged = 0
        """number of callbacks with an invalid signature"""
        self._received = 0
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
        self._received += 1
        if self._received % _REFUSE_ONE_IN == 1 and callback not in self.refused:
            self.refused.add(callback)
            return Response(status_code=503)
        self.ended[decoded.job_id] = decoded.status
        return Response(status_code=204)


_HOST = "127.0.0.1"
_STOP_TIMEOUT = 15.0
_RETRY = RetryPolicy(base=0.2, cap=1.0)
"""retry policy of callbacks: faster than the default, so that retries happen during the run"""


class DemoServer(msgspec.Struct, frozen=True, kw_only=True):
    """The running server, with the objects that the demo uses."""

    url: str
    backend: InstrumentedBackend
    dispatcher: Dispatcher
    receiver: Receiver
    callback_url: str


@contextlib.asynccontextmanager
async def opened(options: DemoOptions) -> AsyncIterator[DemoServer]:
    """Run the server in this event loop. If the server ends by itself, the current task is cancelled.

    Raises `ConfigurationError`, and `DemoFailed` if the store is already used by a dispatcher.
    """
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    receiver = Receiver(secret)
    async with contextlib.AsyncExitStack() as stack:
        port = await stack.enter_async_context(_receiving(receiver))
        if options.embedded:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="taskqueue-demo-", ignore_cleanup_errors=True)
            )
            stack.enter_context(run_embedded(options.backend, f"{folder}/store"))
        settings = _settings(options.port)
        backend = open_backend(options.backend, settings)
        await _ensure_unused(backend)
        server = ServerProcess(
            backend, settings, extensions=[extension(_dispatch_settings(secret, port))]
        )
        await stack.enter_async_context(_serving(server))
        context = server.context
        if context is None or not isinstance(
            result := context.extension_state["dispatch"], Dispatcher
        ):
            raise DemoFailed("the server did not start its dispatcher")
        yield DemoServer(
            url=server.url,
            backend=context.backend,
            dispatcher=result,
            receiver=receiver,
            callback_url=f"http://{_HOST}:{port}/done",
        )


def _settings(port: int) -> Settings:
    """Return the settings of a server that listens on loopback only and needs no token."""
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


def _dispatch_settings(secret: str, port: int) -> DispatchSettings:
    """Return settings with short durations, which also allow callbacks to this machine over http."""
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


async def _ensure_unused(backend: InstrumentedBackend) -> None:
    """Raise `DemoFailed` if the store has endpoints or callbacks, because the run would send those callbacks."""
    pool, control = slots_of(backend), control_of(backend)
    ledger = (await control.stats(CALLBACKS)).ledger
    if (await pool.inspect()).endpoints or ledger.waiting + ledger.scheduled + ledger.in_flight:
        await backend.aclose()
        raise DemoFailed(
            "this store is used by a dispatcher, and the demo would send its callbacks: "
            "use another store, or --backend embedded",
            exit_code=2,
        )
    settings = await control.settings(CALLBACKS)
    await control.configure(CALLBACKS, settings.model_copy(update={"retry": _RETRY}))


@contextlib.asynccontextmanager
async def _serving(server: ServerProcess) -> AsyncIterator[None]:
    """Run the server. When it drains after a signal, or ends, the current task is cancelled."""
    serving, ready = asyncio.create_task(server.run()), asyncio.create_task(server.ready.wait())
    draining = asyncio.create_task(_wait_for_drain(server, ready))
    own = asyncio.current_task()

    def cancel(_: object) -> None:
        if own is not None:
            own.cancel()

    try:
        await asyncio.wait({serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise asyncio.CancelledError
        serving.add_done_callback(cancel)
        draining.add_done_callback(cancel)
        try:
            yield
        except Exception:
            if draining.done():  # the failure follows from the end of the server
                raise asyncio.CancelledError from None
            raise
        finally:
            serving.remove_done_callback(cancel)
            draining.remove_done_callback(cancel)
    finally:
        ready.cancel()
        draining.cancel()
        # Do not call `stop` if a signal has already stopped the server: it would end the drain, and the store closes
        # next.
        server.stop_once()
        done, _ = await asyncio.wait({serving}, timeout=_STOP_TIMEOUT)
        if not done:
            server.stop()
            await asyncio.wait({serving})


async def _wait_for_drain(server: ServerProcess, ready: asyncio.Task[bool]) -> None:
    await asyncio.wait({ready})
    if server.context is not None:
        await server.context.draining.wait()


@contextlib.asynccontextmanager
async def _receiving(receiver: Receiver) -> AsyncIterator[int]:
    """Run the receiver and yield its port."""
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
        yield  # signals stop the run, not the receiver
