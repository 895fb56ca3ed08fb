"""Property-based tests of the HTTP API: schemathesis sends valid and invalid requests derived from the description.

``TASKQUEUE_SCHEMA_EXAMPLES`` sets how many random requests are made for each operation, in addition to those at the
limits of each schema; `dev.py soak` sets it high. `test_openapi` checks the API against its description with fixed
requests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis import settings as tried
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from taskqueue_core.backend import Backend
from taskqueue_core.hooks import Hooks, Identity
from taskqueue_core.instrumented import InstrumentedBackend
from taskqueue_core.migration import MigratingBackend
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from taskqueue_server.api.table import OPERATIONS
from taskqueue_server.context.server import VERSION
from taskqueue_server.context.waiters import ResultWaiters
from taskqueue_server.routing.openapi import document
from tests.server.in_thread import in_thread
from tests.server.support import Door, settings

pytestmark = pytest.mark.long
# Only this file loads the plugin, because loading takes a second.
pytest_plugins = ["schemathesis.pytest.plugin"]
EXAMPLES = int(os.environ.get("TASKQUEUE_SCHEMA_EXAMPLES", "1"))
_MANY = 100
TOKEN = "of-the-test-0123456789-0123456789-0123456789"
# A shared session keeps connections open, because a new connection for each request would be slow.
_session = requests.Session()
_session.trust_env = False
load_all_checks()


@contextmanager
def _serving(backend: Backend, *plugins: object) -> Iterator[str]:
    """Run a server in a thread and yield its URL, because schemathesis blocks while it waits for a response."""
    hooks = Hooks()
    for plugin in plugins:
        hooks.register(plugin)
    with in_thread(ServerProcess(InstrumentedBackend(backend, hooks), settings())) as one:
        assert one.context is not None
        over = asyncio.Event()
        over.set()
        # No request can wait for a result, because no task ever ends here.
        one.context.waiters = ResultWaiters(one.context.control, one.context.hooks, over)
        yield one.url


def _known(token: str) -> Identity | None:
    return Identity(name="test") if token == TOKEN else None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server that requires tokens."""
    with _serving(MemoryBackend(), Door(_known)) as url:
        yield url


@pytest.fixture(scope="module")
def open_server() -> Iterator[str]:
    """The URL of a server without authentication."""
    with _serving(MemoryBackend()) as url:
        yield url


@pytest.fixture(scope="module")
def migrating_server() -> Iterator[str]:
    """The URL of a server without authentication, in a migration between two backends."""
    with _serving(MigratingBackend(MemoryBackend(), MemoryBackend())) as url:
        yield url


@schemathesis.serializer("application/x-ndjson")
def one_line(_: schemathesis.SerializationContext, value: object) -> bytes:
    """Encode a batch of one line."""
    return msgspec.json.encode(value) if not isinstance(value, bytes) else value


def _lighter(told: Any) -> Any:
    """Return a description without ``uniqueItems``: drawing a thousand different items for each array takes seconds."""
    if isinstance(told, dict):
        return {name: _lighter(value) for name, value in told.items() if name != "uniqueItems"}
    return [*map(_lighter, told)] if isinstance(told, list) else told


TOLD = {word: document(OPERATIONS, VERSION, open_to_all=word) for word in (False, True)}
schema = schemathesis.openapi.from_dict(_lighter(TOLD[False]))
# No cases are computed in advance, because the tests of this schema would not use them.
_at_random = schemathesis.Config()
_at_random.projects.default.phases.update(phases=["fuzzing"])
open_schema = schemathesis.openapi.from_dict(_lighter(TOLD[True]), config=_at_random)
_tried_settings = tried(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < _MANY,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
_tried = tried(_tried_settings)
_tried_lightly = tried(_tried_settings, phases=[Phase.generate], max_examples=2 * EXAMPLES)
# The server thread uses the random module at the same time, about which hypothesis would warn.
_of_the_server = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@schema.auth()
class _Shown:
    """Adds the token to a request as the description requires; schemathesis also omits it or sends another one."""

    def get(self, *_: object) -> str:
        """Return the token."""
        return TOKEN

    def set(self, case: schemathesis.Case[Any], data: str, *_: object) -> None:
        """Set the Authorization header."""
        case.headers["Authorization"] = f"Bearer {data}"


def _keeps_its_word(case: schemathesis.Case[Any], url: str) -> None:
    # Not every rule about combinations of fields can be expressed in a schema.
    unfit: list[Any] = [positive_data_acceptance]
    if case.operation.path == "/v1/tasks/batch":
        # The response is 200 with an error for each bad line.
        unfit.append(negative_data_rejection)
    case.call_and_validate(base_url=url, excluded_checks=unfit, session=_session)


@_of_the_server
@schema.parametrize()
@_tried
def test_fuzz_with_a_token(case: schemathesis.Case[Any], server: str) -> None:
    """Faults K2 to K5: no request causes a server error, and every response agrees with the description.

    Security 1 and 12: without a token, or with a wrong one, the response is always 401.
    """
    _keeps_its_word(case, server)


@_of_the_server
@open_schema.include(method="GET").parametrize()
@_tried_lightly
def test_fuzz_without_tokens(case: schemathesis.Case[Any], open_server: str) -> None:
    """Faults K2 and K6: without authentication the description requires no token, and the responses agree with it."""
    _keeps_its_word(case, open_server)


@_of_the_server
@open_schema.include(path_regex="/(migration|dead-letters)").parametrize()
@_tried_lightly
def test_fuzz_while_migrating(case: schemathesis.Case[Any], migrating_server: str) -> None:
    """Faults K2 to K4: during a migration between two backends, all responses agree with the description."""
    _keeps_its_word(case, migrating_server)


def test_the_servers_description_is_this_one(server: str, open_server: str) -> None:
    """The server serves the description that these tests use, with or without authentication."""
    for url, word in ((server, False), (open_server, True)):
        told = httpx2.get(f"{url}/v1/openapi.json", trust_env=False).json()
        assert told == msgspec.json.decode(msgspec.json.encode(TOLD[word]))
        # Check that the document is valid OpenAPI 3.1.
        schemathesis.openapi.from_dict(told).validate()
