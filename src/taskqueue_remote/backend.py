"""The backend and its factory."""

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
from taskqueue_remote.client import HttpClient
from taskqueue_remote.control import RemoteControl
from taskqueue_remote.dead_letters import RemoteDeadLetters
from taskqueue_remote.publisher import RemotePublisher

_HEALTH_TIMEOUT = 5.0


class RemoteBackend:
    """A backend whose calls are HTTP requests to a server: see `taskqueue_core.backend.Backend`.

    It has no subscriptions. The server's backend decides about durability, limits, order and copies; the server
    refuses what its backend does not support.
    """

    capabilities = Capabilities(
        names=frozenset(
            {
                Capability.CONTROL,
                Capability.DEAD_LETTERS,
                Capability.FLOW,
                Capability.ORDER,
                Capability.FAN_OUT,
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
        """Open no connection. Raises `ConfigurationError`. Tests use a ``transport`` in place of the network.

        ``tls_ca`` is a file of certificate authorities (PEM), which are trusted instead of the system's.
        """
        self._client = HttpClient(url, token, transport, tls_ca=tls_ca)
        self.publisher = RemotePublisher(self._client)
        self.control = RemoteControl(self._client)
        self.dead_letters = RemoteDeadLetters(self._client)

    def subscribe(self, keys: Iterable[str], consumer: str) -> NoReturn:  # noqa: ARG002 - the contract's
        """Raise `CapabilityMissing`."""
        raise CapabilityMissing(
            "the server backend has no subscriptions: run a worker ('taskqueue worker module:attr'), "
            "whose socket receives and settles deliveries"
        )

    def now(self) -> float:
        """Return the server's time, exact to half a round trip; before the first response, the time of this machine."""
        return self._client.clock.now()

    async def health(self) -> Health:
        """Ask the server whether it and its store are ready. Returns within 5 seconds."""
        details: dict[str, str | int | float | bool | None] = {"url": self._client.address.shown}
        try:
            answer = await self._client.fetch("GET", "/ready", seconds=_HEALTH_TIMEOUT)
        except TaskQueueError as error:
            return Health(ok=False, backend="server", details=details | {"error": str(error)})
        except Exception as error:  # noqa: BLE001 - health never raises
            name = type(error).__name__
            return Health(ok=False, backend="server", details=details | {"error": name})
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


def create_backend() -> RemoteBackend:
    """Return a backend for the server of the settings (``TASKQUEUE_SERVER_URL``, ``TASKQUEUE_TOKEN``)."""
    settings = load_settings(Settings)
    token = settings.token.get_secret_value() if settings.token else None
    return RemoteBackend(settings.server_url, token, tls_ca=settings.tls_ca)
