"""The HTTP API against its own description: schemathesis asks whatever the description allows, and what it does not.

``TASKQUEUE_SCHEMA_EXAMPLES`` sets how many requests are made up for each operation, beside those at the edges of each
schema; `dev.py soak` sets it high. `test_openapi` holds the API to its description in the tests of every day.
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
pytest_plugins = ["schemathesis.pytest.plugin"]  # no other file loads it: it takes a second
EXAMPLES = int(os.environ.get("TASKQUEUE_SCHEMA_EXAMPLES", "1"))
_MANY = 100
TOKEN = "of-the-test-0123456789-0123456789-0123456789"
_session = requests.Session()  # a connection for each request would take most of the time
_session.trust_env = False
load_all_checks()


@contextmanager
def _serving(backend: Backend, *plugins: object) -> Iterator[str]:
    """Run a server in a loop of its own, for schemathesis waits for its answers; its address."""
    hooks = Hooks()
    for plugin in plugins:
        hooks.register(plugin)
    with in_thread(ServerProcess(InstrumentedBackend(backend, hooks), settings())) as one:
        assert one.context is not None
        over = asyncio.Event()
        over.set()
        one.context.waiters = ResultWaiters(
            one.context.control, one.context.hooks, over
        )  # nobody ends these tasks
        yield one.url


def _known(token: str) -> Identity | None:
    return Identity(name="test") if token == TOKEN else None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with tokens."""
    with _serving(MemoryBackend(), Door(_known)) as url:
        yield url


@pytest.fixture(scope="module")
def open_server() -> Iterator[str]:
    """The address of a server without."""
    with _serving(MemoryBackend()) as url:
        yield url


@pytest.fixture(scope="module")
def migrating_server() -> Iterator[str]:
    """The address of a server without tokens that is on its way from one backend to another."""
    with _serving(MigratingBackend(MemoryBackend(), MemoryBackend())) as url:
        yield url


@schemathesis.serializer("application/x-ndjson")
def one_line(_: schemathesis.SerializationContext, value: object) -> bytes:
    """A batch of one line."""
    return msgspec.json.encode(value) if not isinstance(value, bytes) else value


schema = schemathesis.openapi.from_dict(document(OPERATIONS, VERSION, open_to_all=False))
_at_random = (
    schemathesis.Config()
)  # no cases are worked out beforehand: the tests of it would not ask them
_at_random.projects.default.phases.update(phases=["fuzzing"])
open_schema = schemathesis.openapi.from_dict(
    document(OPERATIONS, VERSION, open_to_all=True), config=_at_random
)
_tried_settings = tried(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES < _MANY,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
_tried = tried(_tried_settings)
_tried_lightly = tried(_tried_settings, phases=[Phase.generate], max_examples=2 * EXAMPLES)
# The server's thread makes random numbers meanwhile; that is no strategy's doing.
_of_the_server = pytest.mark.filterwarnings("ignore:Do not use the `random` module")


@schema.auth()
class _Shown:
    """The token, as the description says that it is shown; schemathesis also leaves it out, or shows another."""

    def get(self, *_: object) -> str:
        """Return it."""
        return TOKEN

    def set(self, case: schemathesis.Case[Any], data: str, *_: object) -> None:
        """Put it where it belongs."""
        case.headers["Authorization"] = f"Bearer {data}"


def _keeps_its_word(case: schemathesis.Case[Any], url: str) -> None:
    # not every rule between fields can be said in a schema
    unfit: list[Any] = [positive_data_acceptance]
    if case.operation.path == "/v1/tasks/batch":
        unfit.append(negative_data_rejection)  # a bad line is answered as one, with 200
    case.call_and_validate(base_url=url, excluded_checks=unfit, session=_session)


@_of_the_server
@schema.parametrize()
@_tried
def test_fuzz_with_a_token(case: schemathesis.Case[Any], server: str) -> None:
    """Faults K2 to K5: no request of whatever shape fails the server, and every answer is as it is described.

    Security 1 and 12: without the token, or with another, nothing is answered but 401.
    """
    _keeps_its_word(case, server)


@_of_the_server
@open_schema.include(method="GET").parametrize()
@_tried_lightly
def test_fuzz_without_tokens(case: schemathesis.Case[Any], open_server: str) -> None:
    """Faults K2 and K6: where nobody needs a token the description says so, and is kept too."""
    _keeps_its_word(case, open_server)


@_of_the_server
@open_schema.include(path_regex="/(migration|dead-letters)").parametrize()
@_tried_lightly
def test_fuzz_while_migrating(case: schemathesis.Case[Any], migrating_server: str) -> None:
    """Faults K2 to K4: with two backends behind it, too."""
    _keeps_its_word(case, migrating_server)


def test_the_servers_description_is_this_one(server: str, open_server: str) -> None:
    """What a server tells of itself is what is checked here: whether it needs a token, too."""
    for url, it in ((server, schema), (open_server, open_schema)):
        it.validate()  # it is OpenAPI 3.1
        told = httpx2.get(f"{url}/v1/openapi.json", trust_env=False).json()
        assert told == msgspec.json.decode(msgspec.json.encode(it.raw_schema))
