"""The dispatcher's operations against their own description: whatever it allows is asked, and what it does not.

``TASKQUEUE_SCHEMA_EXAMPLES`` sets how many requests are made up for each operation; `dev.py soak` sets it high.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import settings as tried
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from taskqueue_dispatch.api import extension
from taskqueue_dispatch.api.extension import OPERATIONS, TAGS
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess
from taskqueue_server.api.table import OPERATIONS as CORE
from taskqueue_server.context.server import VERSION
from taskqueue_server.context.waiters import ResultWaiters
from taskqueue_server.routing.openapi import document
from tests.dispatch.support import settings
from tests.server.in_thread import in_thread
from tests.server.support import settings as server_settings
from tests.server.test_schema import _tried_settings

pytest_plugins = ["schemathesis.pytest.plugin"]  # no other test loads it: it takes a second
_session = requests.Session()  # a connection for each request would take most of the time
_session.trust_env = False
load_all_checks()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server, in a loop of its own, for schemathesis waits for its answers."""
    extensions = [extension(settings(health_interval=60.0))]
    with in_thread(ServerProcess(MemoryBackend(), server_settings(), extensions=extensions)) as one:
        assert one.context is not None
        over = asyncio.Event()
        over.set()
        one.context.waiters = ResultWaiters(
            one.context.control, one.context.hooks, over
        )  # nobody ends these jobs
        yield one.url


_told = document((*CORE, *OPERATIONS), VERSION, open_to_all=True, tags=TAGS)
schema = schemathesis.openapi.from_dict(_told)
_ours = schema.include(path_regex="^/(queue|tasks|admin)/")


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@_ours.parametrize()
@tried(_tried_settings)
def test_fuzz(case: schemathesis.Case[Any], server: str) -> None:
    """No request of whatever shape fails the server, and every answer is as it is described (faults K2 to K5, C6)."""
    unfit: list[Any] = [
        positive_data_acceptance,  # not every rule between fields can be said in a schema
        not_a_server_error,  # a model without slots is answered with 503
    ]
    answer = case.call_and_validate(base_url=server, excluded_checks=unfit, session=_session)
    assert answer.status_code in {*range(200, 500), 503}


def test_the_servers_description_is_this_one(server: str) -> None:
    """What a server with the dispatcher tells of itself is what is checked here (fault K6, C6)."""
    schema.validate()  # it is OpenAPI 3.1
    told = httpx2.get(f"{server}/v1/openapi.json", trust_env=False).json()
    assert told == msgspec.json.decode(msgspec.json.encode(_told))
    ids = [one["operationId"] for path in told["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))
    assert {"/queue/submit", "/admin/model-configs/{model}", "/admin/dlq"} <= told["paths"].keys()
