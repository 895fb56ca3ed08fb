"""The server of a demo run, with its store and dispatcher, and the receiver of callbacks."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import msgspec
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
from taskqueue_core.concurrency import first_completed
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.retry import RetryPolicy
from taskqueue_dispatch.api.extension import extension
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.demo.plan import DemoOptions
from taskqueue_dispatch.gpu_server.simulator import LocalServer
from taskqueue_dispatch.handler_helpers import NAME
from taskqueue_dispatch.names import CALLBACKS
from taskqueue_dispatch.service import Dispatcher
from taskqueue_server.process.serve import ServerProcess

_REFUSE_ONE_IN = 10
"""one in this many callbacks is refused at its first attempt"""


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
        self.url = ""
        """the URL of the receiver, once it listens"""
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
_SERVER_SETTINGS = {
    "host": _HOST,
    "processes": 1,
    "extensions": frozenset[str](),
    "tokens_file": None,
    "tls_certificate": None,
    "tls_key": None,
    "drain": 0.5,
}
"""settings of a server that listens on loopback only and needs no token"""


class DemoServer(msgspec.Struct, frozen=True, kw_only=True):
    """The running server, with the objects that the demo uses."""

    url: str
    dispatcher: Dispatcher
    receiver: Receiver


async def serve_during(options: DemoOptions, work: Callable[[DemoServer], Awaitable[None]]) -> None:
    """Run a server in this event loop, and call ``work`` with it. If the server stops first, ``work`` is cancelled.

    Raises `asyncio.CancelledError` in that case, `DemoFailed` if a dispatcher already uses the store, and
    `ConfigurationError`.
    """
    secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
    async with contextlib.AsyncExitStack() as stack:
        receiver = Receiver(secret)
        port = await stack.enter_async_context(_receiving(receiver))
        if options.embedded:
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="taskqueue-demo-", ignore_cleanup_errors=True)
            )
            stack.enter_context(run_embedded(options.backend, f"{folder}/store"))
        settings = load_settings(Settings).model_copy(
            update=_SERVER_SETTINGS | {"port": options.port}
        )
        backend = open_backend(options.backend, settings)
        await _ensure_unused(backend)
        server = ServerProcess(
            backend, settings, extensions=[extension(_dispatch_settings(secret, port))]
        )

        async def ready() -> None:
            if server.context is None:
                raise DemoFailed("the server did not start its dispatcher")
            dispatcher = cast("Dispatcher", server.context.extension_state[NAME])
            await work(DemoServer(url=server.url, dispatcher=dispatcher, receiver=receiver))

        await run_server(server, ready)


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
    """Raise `DemoFailed` if the store has endpoints or unsent callbacks. Otherwise set the callbacks' retry policy."""
    pool, control = slots_of(backend), control_of(backend)
    ledger = (await control.stats(CALLBACKS)).ledger
    if (await pool.inspect()).endpoints or ledger.waiting + ledger.scheduled + ledger.in_flight:
        await backend.aclose()
        raise DemoFailed(
            "a dispatcher already uses this store, and the demo would send that dispatcher's callbacks: "
            "use another store, or --backend embedded",
            exit_code=2,
        )
    settings = await control.settings(CALLBACKS)
    await control.configure(CALLBACKS, settings.model_copy(update={"retry": _RETRY}))


async def run_server(server: ServerProcess, work: Callable[[], Awaitable[None]]) -> None:
    """Run a server, call ``work`` once the server is ready, and then stop the server.

    If the server drains after a signal, or ends by itself, cancel ``work`` and raise `asyncio.CancelledError`.
    """
    serving = asyncio.create_task(server.run())

    async def ready() -> None:
        await server.ready.wait()
        await work()

    async def drained() -> None:
        await server.ready.wait()
        if server.context is not None:
            await server.context.draining.wait()
        raise asyncio.CancelledError

    async def ended() -> None:
        await asyncio.wait({serving})
        serving.result()
        raise asyncio.CancelledError

    try:
        await first_completed(ended(), drained(), ready())
    except Exception:
        if server.context is not None and server.context.draining.is_set():
            raise asyncio.CancelledError from None  # `work` failed because the server was stopping
        raise
    finally:
        # Do not stop the server again after a signal, because a second call of `stop` would end the drain early.
        server.stop_once()
        done, _ = await asyncio.wait({serving}, timeout=_STOP_TIMEOUT)
        if not done:
            server.stop()
            await asyncio.wait({serving})


@contextlib.asynccontextmanager
async def _receiving(receiver: Receiver) -> AsyncIterator[int]:
    """Run the receiver and yield its port."""
    program = LocalServer(receiver.app)
    port = await program.listen()
    receiver.url = f"http://{_HOST}:{port}/done"
    try:
        yield port
    finally:
        program.cut()
        await program.wait_closed()
