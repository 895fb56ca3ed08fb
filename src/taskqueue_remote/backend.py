"""The backend named ``server``, and the function that creates it from the settings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import httpx2
import msgspec

from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import CapabilityMissing, TaskQueueError
from taskqueue_core.tasks import Health
from taskqueue_remote.audit import RemoteAudit
from taskqueue_remote.client import HttpClient
from taskqueue_remote.control import RemoteControl
from taskqueue_remote.dead_letters import RemoteDeadLetters
from taskqueue_remote.dependencies import RemoteDependencies
from taskqueue_remote.listing import RemoteListing
from taskqueue_remote.publisher import RemotePublisher
from taskqueue_remote.schedules import RemoteSchedules
from taskqueue_remote.streams import RemoteStreams
from taskqueue_remote.workflows import RemoteWorkflows

_HEALTH_TIMEOUT = 5.0


class RemoteBackend:
    """A backend that sends each call as an HTTP request to a server.

    It has no subscriptions. Capabilities such as limits, order and fan-out are listed here because the server may
    support them; if the server's own backend does not, the server rejects the request.
    """

    capabilities = Capabilities(
        names=frozenset(
            {
                Capability.CONTROL,
                Capability.DEAD_LETTERS,
                Capability.FLOW,
                Capability.ORDERING_KEYS,
                Capability.FAIR_ORDER,
                Capability.FLOOR_SHARE,
                Capability.FAN_OUT,
                Capability.UNIQUE,
                Capability.AUDIT,
                Capability.LISTING,
                Capability.STREAMS,
                Capability.SCHEDULES,
                Capability.AFTER,
            }
        ),
        shared=True,
        atomic_retry=False,
    )

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        transport: httpx2.AsyncBaseTransport | None = None,
        tls_ca: Path | str | None = None,
    ) -> None:
        """Check the address and the token, without connecting. Raises `ConfigurationError` if either is invalid.

        Tests pass a ``transport``, which replaces the network. ``tls_ca`` is a PEM file with the certificate
        authorities to trust, instead of those of the system.
        """
        self._client = HttpClient(url, token, transport, tls_ca=tls_ca)
        self.publisher = RemotePublisher(self._client)
        self.control = RemoteControl(self._client)
        self.dead_letters = RemoteDeadLetters(self._client)
        self.audit = RemoteAudit(self._client)
        self.listing = RemoteListing(self._client)
        self.streams = RemoteStreams(self._client)
        self.schedules = RemoteSchedules(self._client)
        self.workflows = RemoteWorkflows(self._client)
        self.dependencies = RemoteDependencies(self._client)

    def subscribe(self, keys: Iterable[str], consumer: str) -> NoReturn:  # noqa: ARG002 - the signature of `Backend`
        """Raise `CapabilityMissing`, because this backend has no subscriptions."""
        raise CapabilityMissing(
            "the server backend has no subscriptions: run a worker ('taskqueue worker module:attr'), "
            "whose socket receives and settles deliveries"
        )

    def now(self) -> float:
        """Return the estimated time of the server in Unix seconds; before the first response, this machine's time."""
        return self._client.clock.now()

    async def health(self) -> Health:
        """Return whether the server and its store are ready. Takes at most 5 seconds and never raises an exception."""
        details: dict[str, str | int | float | bool | None] = {"url": self._client.address.shown}
        try:
            answer = await self._client.fetch("GET", "/ready", seconds=_HEALTH_TIMEOUT)
        except Exception as error:  # noqa: BLE001 - this method must not raise
            text = str(error) if isinstance(error, TaskQueueError) else type(error).__name__
            return Health(ok=False, backend="server", details=details | {"error": text})
        return Health(ok=answer.ok, backend="server", details=details | _scalars(answer.body))

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        await self._client.aclose()


def _scalars(body: bytes) -> dict[str, str | int | float | bool | None]:
    try:
        decoded = msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return {
        name: value
        for name, value in decoded.items()
        if value is None or isinstance(value, str | int | float | bool)
    }


def create_backend(
    url: str | None = None, token: str | None = None, tls_ca: Path | str | None = None
) -> RemoteBackend:
    """Return a backend for the server at ``url``. What is not given is taken from the settings ``TASKQUEUE_...``."""
    settings = load_settings(Settings)
    if token is None and settings.token:
        token = settings.token.get_secret_value()
    return RemoteBackend(url or settings.server_url, token, tls_ca=tls_ca or settings.tls_ca)
