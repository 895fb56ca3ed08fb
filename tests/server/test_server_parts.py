"""Server extensions of other packages follow the same rules as the built-in parts of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from taskqueue_core.config import Settings, load_settings
from taskqueue_core.errors import CapabilityMissing, ConfigurationError
from taskqueue_memory import MemoryBackend
from taskqueue_server import ServerProcess, create_app
from taskqueue_server.context.server import ServerContext
from taskqueue_server.dashboard.pages import render
from taskqueue_server.process.channel import Begin, line, plain, settings_of
from taskqueue_server.routing import extensions
from taskqueue_server.routing.extensions import Extension, NavLink, load_extensions
from taskqueue_server.routing.operations import Operation, Query, RequestContext, Scope, answer
from tests.server.access import A, B, bearer, entry, write
from tests.server.support import http, problem, running, settings


async def greet(call: RequestContext) -> Response:
    """Return the greeting from the state of the extension."""
    call.demand(call.request.path_params["who"].replace("/", "."))
    return answer({"said": call.context.extension_state["greeting"]})


async def page(call: RequestContext) -> Response:
    """Render the page of the extension."""
    return await render(call, "greeting.html", who="<b>you</b>")


GREET = Operation(
    method="GET",
    path="/greetings/{who:path}",
    handler=greet,
    verb="admin",
    tag="greetings",
    scope=Scope.HANDLER,
    strict=True,
    query=(Query("loud", {"type": "boolean"}, "whether to shout"),),
    answers={200: dict[str, str]},
)
PAGE = Operation(
    method="GET",
    path="/greeting",
    handler=page,
    verb="admin",
    scope=Scope.HANDLER,
    answers={200: None},
)


class Steps(list[str]):
    """A list of what happened, in order."""

    def part(self, **changes: Any) -> Extension:
        """Return an extension that records when it is opened, entered and left."""

        @asynccontextmanager
        async def entered() -> AsyncIterator[str]:
            self.append("entered")
            yield "hello"
            self.append("left")

        def opened(_: ServerContext) -> AbstractAsyncContextManager[object]:
            self.append("opened")
            return entered()

        told: dict[str, Any] = {"name": "greeting", "open": opened, "operations": (GREET,)}
        return Extension(**{**told, **changes})


class Store(MemoryBackend):
    """A memory backend that records when it is closed."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps

    async def aclose(self) -> None:
        """Record the close."""
        self._steps.append("closed")
        await super().aclose()


async def test_a_part_lives_within_the_life_of_the_server() -> None:
    """Fault E4: an extension is entered before the first request, and left before the backend is closed."""
    steps = Steps()
    async with running(Store(steps), extensions=[steps.part()]) as it, http(it) as client:
        assert steps == ["opened", "entered"]
        assert (await client.get("/greetings/a")).json() == {"said": "hello"}
    assert steps == ["opened", "entered", "left", "closed"]


async def test_its_operations_obey_the_doors_rules(tmp_path: Path) -> None:
    """Security 2, fault K1: operations of an extension require a token (401) with the key (403).

    Unknown parameters are refused.
    """
    path = write(tmp_path / "tokens.toml", entry(A, "a", keys=["a.b"]), entry(B, "b", keys=["b"]))
    async with running(extensions=[Steps().part()], tokens_file=path) as it, http(it) as client:
        problem(await client.get("/greetings/a%2Fb"), 401, "unauthenticated")
        problem(await client.get("/greetings/a%2Fb", headers=bearer(B)), 403, "forbidden")
        answered = await client.get("/greetings/a%2Fb", headers=bearer(A))
        assert answered.status_code == 200
        odd = await client.get("/greetings/a%2Fb?louder=1", headers=bearer(A))
        problem(odd, 422, "invalid_input", "query")
        problem(await client.post("/greetings/a"), 405, "method_not_allowed")


async def test_its_operations_are_described_and_counted() -> None:
    """Fault K6: operations of an extension appear in the OpenAPI document and in the metrics.

    In both, they have the same path template.
    """
    part = Steps().part(tags={"greetings": "Be polite."})
    async with running(extensions=[part]) as it, http(it) as client:
        told = (await client.get("/v1/openapi.json")).json()
        described = told["paths"]["/greetings/{who}"]["get"]
        assert [one["name"] for one in described["parameters"]] == ["who", "loud"]
        assert {"name": "greetings", "description": "Be polite."} in told["tags"]
        await client.get("/greetings/canary")
        counted = (await client.get("/metrics")).text
        assert 'path="/greetings/{who}"' in counted
        assert "canary" not in counted
    async with running() as it, http(it) as client:
        assert "/greetings/{who}" not in (await client.get("/v1/openapi.json")).json()["paths"]


async def test_its_pages_are_pages_of_the_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault K5: a page of an extension is escaped, has the same content policy, and is linked from every page.

    A visitor without a session is redirected to the sign-in page.
    """
    templates = tmp_path / "greetings_of_a_test" / "templates"
    templates.mkdir(parents=True)
    (templates.parent / "__init__.py").touch()
    text = '{% extends "base.html" %}{% block title %}T{% endblock %}{% block main %}{{ who }}{% endblock %}'
    (templates / "greeting.html").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    part = Steps().part(
        pages=(PAGE,), links=(NavLink("Greeting", "/greeting"),), templates="greetings_of_a_test"
    )
    async with running(extensions=[part]) as it, http(it) as client:
        shown = await client.get("/greeting")
        assert "&lt;b&gt;you&lt;/b&gt;" in shown.text
        assert "default-src 'none'" in shown.headers["content-security-policy"]
        for where in ("/", "/workers", "/queues/k"):
            assert '<a href="/greeting">Greeting</a>' in (await client.get(where)).text
        assert 'href="/greeting" aria-current="page"' in shown.text
    tokens = write(tmp_path / "tokens.toml", entry(A, "a"))
    async with running(extensions=[part], tokens_file=tokens) as it, http(it) as client:
        assert (await client.get("/greeting")).headers["location"] == "/login?next=%2Fgreeting"


@pytest.mark.parametrize(
    "extensions",
    [
        [Steps().part(), Steps().part(operations=())],
        [Steps().part(), Steps().part(name="other")],
        [Steps().part(operations=(), pages=(GREET,)), Steps().part(name="other")],
        [
            Steps().part(
                operations=(Operation(method="PUT", path="/v1/tasks", handler=greet, answers={}),)
            )
        ],
        [
            Steps().part(
                operations=(Operation(method="GET", path="/metrics", handler=greet, answers={}),)
            )
        ],
    ],
)
def test_no_part_takes_anothers_place(extensions: list[Extension]) -> None:
    """An extension whose name or path is already in use is refused."""
    with pytest.raises(ConfigurationError, match=r"use the (name|path)"):
        create_app(MemoryBackend(), settings(), extensions)


async def test_a_part_that_cannot_work_ends_the_server() -> None:
    """Fault E4: an extension that fails to open stops the server with its reason, and the backend is closed."""

    def lacks(_: ServerContext) -> AbstractAsyncContextManager[object]:
        raise CapabilityMissing("it needs slots")

    class Fails:
        async def __aenter__(self) -> None:
            raise ConfigurationError("it cannot be entered")

        async def __aexit__(self, *_: object) -> None:
            steps.append("left")

    for opened, reason in ((lacks, "needs slots"), (lambda _: Fails(), "cannot be entered")):
        steps = Steps()
        server = ServerProcess(Store(steps), settings(), extensions=[steps.part(open=opened)])
        with pytest.raises(ConfigurationError, match=reason):
            await asyncio.wait_for(server.run(), 5)
        assert steps == ["closed"]


class TestNames:
    """Extensions are found by the names in the settings, which are passed to every server process."""

    def found(self, monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
        """Make these the only installed entry points."""
        points = [
            EntryPoint(name, value, extensions.EXTENSIONS_GROUP) for name, value in values.items()
        ]
        monkeypatch.setattr(extensions, "entry_points", lambda **_: points)

    def test_in_the_order_of_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Extensions are loaded once each and in the order of their names; only those in the settings are imported."""
        here = f"{__name__}:"
        self.found(monkeypatch, b=here + "made", a=here + "made_too", c="no_such_module:part")
        assert [part.name for part in load_extensions(["b", "a", "b"])] == ["other", "greeting"]

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (None, "extension 'wanted' not found; installed: other"),
            ("no_such_module:part", "needs the module 'no_such_module'"),
            ("builtins:dict", "must return an Extension, not dict"),
        ],
    )
    def test_what_is_no_part(
        self, monkeypatch: pytest.MonkeyPatch, value: str | None, reason: str
    ) -> None:
        """An extension that is missing, cannot be imported or has the wrong type is refused at the start."""
        told = {"other": "builtins:dict"} if value is None else {"wanted": value}
        self.found(monkeypatch, **told)
        with pytest.raises(ConfigurationError, match=reason):
            ServerProcess(MemoryBackend(), settings(extensions=frozenset({"wanted"})))

    def test_from_the_environment_to_every_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The extensions in the environment of the first process are passed unchanged to the other processes."""
        monkeypatch.setenv("TASKQUEUE_EXTENSIONS", "dispatch, other")
        told = load_settings(Settings)
        assert told.extensions == {"dispatch", "other"}
        assert b'"extensions":["dispatch","other"]' in line(Begin(plain(told), "memory", []))
        assert settings_of(plain(told)) == told


def made() -> Extension:
    """Return an extension, as the target of an entry point."""
    return Steps().part()


def made_too() -> Extension:
    """Return another extension, as the target of an entry point."""
    return Steps().part(name="other")
