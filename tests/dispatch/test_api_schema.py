"""Tests of the dispatcher's HTTP API against its OpenAPI description, with generated valid and invalid requests.

``TASKQUEUE_SCHEMA_EXAMPLES`` sets the number of generated requests per operation; `dev.py soak` sets a high one.
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

# loaded in this file only, because the import takes a second
pytest_plugins = ["schemathesis.pytest.plugin"]
_session = requests.Session()  # a new connection for each request would take most of the time
_session.trust_env = False
load_all_checks()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield a server's URL.

    It runs in a thread of its own, because schemathesis blocks while it waits for responses.
    """
    extensions = [extension(settings(health_interval=60.0))]
    with in_thread(ServerProcess(MemoryBackend(), server_settings(), extensions=extensions)) as one:
        assert one.context is not None
        over = asyncio.Event()
        over.set()
        one.context.waiters = ResultWaiters(
            one.context.control, one.context.hooks, over
        )  # do not wait for jobs, because no GPU server ends them
        yield one.url


_told = document((*CORE, *OPERATIONS), VERSION, open_to_all=True, tags=TAGS)
schema = schemathesis.openapi.from_dict(_told)
_ours = schema.include(path_regex="^/(queue|tasks|admin)/")


@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@_ours.parametrize()
@tried(_tried_settings)
def test_fuzz(case: schemathesis.Case[Any], server: str) -> None:
    """No request makes the server fail, and every response matches its description (faults K2 to K5, C6)."""
    unfit: list[Any] = [
        positive_data_acceptance,  # some rules between fields cannot be expressed in a schema
        not_a_server_error,  # the dispatcher answers 503 if the model has no slots
    ]
    answer = case.call_and_validate(base_url=server, excluded_checks=unfit, session=_session)
    assert answer.status_code in {*range(200, 500), 503}


def test_the_servers_description_is_this_one(server: str) -> None:
    """The description that a server with the dispatcher serves is the one that these tests check (fault K6, C6)."""
    schema.validate()  # the description is valid OpenAPI 3.1
    told = httpx2.get(f"{server}/v1/openapi.json", trust_env=False).json()
    assert told == msgspec.json.decode(msgspec.json.encode(_told))
    ids = [one["operationId"] for path in told["paths"].values() for one in path.values()]
    assert len(ids) == len(set(ids))
    assert {"/queue/submit", "/admin/model-configs/{model}", "/admin/dlq"} <= told["paths"].keys()
