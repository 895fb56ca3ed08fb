"""Everything except publishing through the remote backend: lookups, control, health and time."""

import json
import logging

import httpx2
import pytest

from taskqueue_cli.commands.dead_letters import act_on_all
from taskqueue_core.backend import Backend
from taskqueue_core.capabilities import QueueSettings
from taskqueue_core.errors import (
    BackendUnavailable,
    CapabilityMissing,
    ConfigurationError,
    InvalidInput,
    SettingsConflict,
    TaskQueueError,
    UnknownKey,
)
from taskqueue_core.loading import check_backend
from taskqueue_core.tasks import Delivery, Task
from taskqueue_remote import RemoteBackend, create_backend
from taskqueue_remote.client import RemoteClock


def remote(answer: httpx2.Response) -> RemoteBackend:
    """Return a backend whose server always sends the same response."""
    return RemoteBackend("http://h/base", transport=httpx2.MockTransport(lambda _: answer))


def problem(status: int, code: str, **more: object) -> httpx2.Response:
    """Return a problem document as the server sends it."""
    return httpx2.Response(status, json={"status": status, "code": code, "detail": "why"} | more)


def test_it_is_a_backend_without_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """G2: a backend may publish without supporting subscriptions; the error says what to use instead."""
    monkeypatch.setenv("TASKQUEUE_SERVER_URL", "https://h:1/x/")
    backend = create_backend()
    check_backend(backend, "server")
    typed: Backend = backend
    assert typed.capabilities.shared
    with pytest.raises(CapabilityMissing, match="taskqueue worker"):
        typed.subscribe(["k"], "c")


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h", "http://", "http://h:x", "http://h?a=1"])
def test_an_address_that_cannot_be_one_is_refused_at_once(url: str) -> None:
    """An invalid URL is refused when the backend is created, not at its first use."""
    with pytest.raises(ConfigurationError, match="http://host:port"):
        RemoteBackend(url)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("127.0.0.1:18655", "http:// is missing"),
        ("localhost:18655", "http:// is missing"),
        ("redis://127.0.0.1:6379", "TASKQUEUE_BACKEND=redis and TASKQUEUE_REDIS_URL"),
    ],
)
def test_an_invalid_address_is_explained(url: str, advice: str) -> None:
    """U4: an address without a scheme, or of a store, is refused with what to write instead."""
    with pytest.raises(ConfigurationError, match=advice):
        RemoteBackend(url)


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_another_server_is_named(status: int) -> None:
    """U4: a publish to a web server that is not a server of this project says so."""
    backend = remote(httpx2.Response(status, text="<html>"))
    with pytest.raises(ConfigurationError, match="not a taskqueue server"):
        await backend.publisher.publish(Task(key="k", id="1"))


@pytest.mark.parametrize("own", [logging.NOTSET, logging.DEBUG])
async def test_requests_are_not_logged(caplog: pytest.LogCaptureFixture, own: int) -> None:
    """U10: an application that logs at level info gets no line per request, unless it sets the level of ``httpx2``."""
    log = logging.getLogger("httpx2")
    before = log.level
    log.setLevel(own)
    try:
        with caplog.at_level(logging.INFO):
            await remote(httpx2.Response(200, json={})).health()
        assert ("HTTP Request" in caplog.text) == (own == logging.DEBUG)
    finally:
        log.setLevel(before)


def test_a_token_that_no_header_can_carry_is_refused() -> None:
    """A token that is not valid in an HTTP header is refused, and the error does not show it."""
    with pytest.raises(ConfigurationError) as caught:
        RemoteBackend("http://h", "geheim\n")
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(422, "invalid_input", field="limit"), InvalidInput),
        (problem(404, "unknown_key", field="key"), UnknownKey),
        (problem(409, "settings_conflict"), SettingsConflict),
        (problem(501, "capability_missing"), CapabilityMissing),
        (problem(503, "backend_unavailable"), BackendUnavailable),
        (problem(500, "internal"), BackendUnavailable),
        (problem(429, "too_many"), BackendUnavailable),
        (problem(403, "forbidden"), ConfigurationError),
        (problem(418, "teapot"), TaskQueueError),
        (httpx2.Response(404, text="nginx"), ConfigurationError),
        (httpx2.Response(200, text="nginx"), ConfigurationError),
        (httpx2.Response(200, content=b"\xff"), ConfigurationError),
    ],
)
async def test_problems_become_the_errors_of_a_local_backend(
    answer: httpx2.Response, error: type[Exception]
) -> None:
    """G4: an error response of the server raises the same error class as a local backend."""
    with pytest.raises(error):
        await remote(answer).control.stats("k")


async def test_an_invalid_input_keeps_its_parts() -> None:
    """An error about invalid input keeps its field and its text across HTTP."""
    told = InvalidInput("limit", "text of length 9", "1 to 1000")
    answer = problem(422, told.code, field=told.field, detail=str(told))
    with pytest.raises(InvalidInput) as caught:
        await remote(answer).control.ledger("k")
    assert str(caught.value) == str(told)


async def test_names_are_checked_before_they_become_paths() -> None:
    """A key or id that is not valid is refused, so that it cannot change the path of the request."""
    control = remote(httpx2.Response(200)).control
    for name in ("../workers", "a/b", "", "a b", "a?x"):
        with pytest.raises(InvalidInput):
            await control.stats(name)
        with pytest.raises(InvalidInput):
            await control.cancel("k", name)


async def test_settings_that_this_version_does_not_know_are_not_dropped() -> None:
    """A client refuses to read settings with unknown fields, so that it cannot overwrite those of a newer server."""
    text = QueueSettings().model_dump_json().replace("{", '{"brand_new":1,', 1)
    with pytest.raises(ConfigurationError, match="unknown queue settings: upgrade this client"):
        await remote(httpx2.Response(200, text=text)).control.settings("k")


async def test_answers_that_are_too_large_are_divided() -> None:
    """U10: if the statuses of many tasks are too large for one response, the backend asks again with fewer ids."""
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        ids = json.loads(request.content)["ids"]
        asked.append(len(ids))
        if len(ids) > 2:
            return problem(413, "too_large", field="ids")
        return httpx2.Response(200, json={"statuses": dict.fromkeys(ids)})

    backend = RemoteBackend("http://h", transport=httpx2.MockTransport(answer))
    assert await backend.control.statuses("k", *"abcdefg") == (None,) * 7
    assert max(asked) == 7
    assert sorted(each for each in asked if each <= 2) == [1, 2, 2, 2]


async def test_progress_belongs_to_workers() -> None:
    """Operations that need a delivery raise `CapabilityMissing`."""
    delivery = Delivery(task=Task(key="k"), receipt="r", attempt=1, delivered_at=0.0)
    backend = remote(httpx2.Response(200))
    with pytest.raises(CapabilityMissing):
        await backend.control.progress(delivery, 0.5)
    with pytest.raises(CapabilityMissing):
        await backend.publisher.schedule_retry(delivery.task, 1.0, settles=delivery)


async def test_a_question_that_met_a_closed_connection_is_asked_again() -> None:
    """A read on a connection that the server has closed is repeated; a change is not."""
    methods: list[str] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        methods.append(request.method)
        if len(methods) == 1 or request.method != "GET":
            raise httpx2.RemoteProtocolError("closed", request=request)
        return httpx2.Response(200, json={"workers": []})

    backend = RemoteBackend("http://h", transport=httpx2.MockTransport(handler))
    assert await backend.control.workers() == ()
    with pytest.raises(BackendUnavailable):
        await backend.control.purge("k")
    assert methods == ["GET", "GET", "POST"]


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.Response(503, json={"ready": False, "reason": "store"}),
        httpx2.Response(500, text="?"),
        httpx2.Response(404),
    ],
)
async def test_health_never_raises(answer: httpx2.Response) -> None:
    """Whatever the server responds, `health` returns a result and does not raise."""
    assert not (await remote(answer).health()).ok


@pytest.mark.parametrize("error", [httpx2.ConnectError("x"), ValueError("a bug of a transport")])
async def test_health_never_raises_without_a_server(error: Exception) -> None:
    """If there is no server, `health` returns a result with the error."""

    def handler(_: httpx2.Request) -> httpx2.Response:
        raise error

    backend = RemoteBackend("http://h", transport=httpx2.MockTransport(handler))
    health = await backend.health()
    assert (health.ok, health.backend) == (False, "server")
    assert health.details["error"]


async def test_health_passes_on_what_the_server_says() -> None:
    """The health of the backend is the readiness that the server reports."""
    health = await remote(httpx2.Response(200, json={"ready": True, "reason": "ok"})).health()
    assert health.ok
    assert health.details == {"url": "http://h/base", "ready": True, "reason": "ok"}


async def test_time_is_the_servers() -> None:
    """After the first response, the time of the backend is the time of the server."""
    headers = {"taskqueue-time": "5000.5"}
    backend = remote(httpx2.Response(200, json={"workers": []}, headers=headers))
    assert backend.now() > 1_000_000_000
    await backend.control.workers()
    assert 5000.4 < backend.now() < 5005


def test_the_quickest_answer_sets_the_clock() -> None:
    """The clock estimate comes from the fastest response, until that is too old; invalid headers are ignored."""
    here = 100.0
    clock = RemoteClock(monotonic=lambda: here, system=lambda: 7.0)
    assert clock.now() == 7.0
    clock.learn("1000", requested=99.8)
    assert clock.now() == pytest.approx(1000.1)
    for header, asked in (
        ("2000", 90.0),
        ("soon", 100.0),
        ("nan", 100.0),
        ("-1", 100.0),
        (None, 100.0),
    ):
        clock.learn(header, asked)
    assert clock.now() == pytest.approx(1000.1)
    here = 100_000.0
    clock.learn("50000", requested=99_999.0)
    assert clock.now() == pytest.approx(50_000.5)


async def test_closing_twice_is_harmless() -> None:
    """Closing a backend twice is harmless."""
    backend = remote(httpx2.Response(200, json={"workers": []}))
    await backend.control.workers()
    await backend.aclose()
    await backend.aclose()


async def test_pages_that_start_again_show_nothing_twice() -> None:
    """If pages of dead letters start again from the beginning, each letter is still returned once."""
    letters = [
        {
            "task": {"id": f"t{n}", "key": "k"},
            "attempt": 1,
            "losses": 0,
            "reason": "r",
            "failed_at": 1,
        }
        for n in range(1000)
    ]
    backend = remote(httpx2.Response(200, json={"dead_letters": letters}))
    assert len(await backend.dead_letters.list("k", limit=5000)) == 1000


async def test_pages_of_schedules() -> None:
    """U13: a list of schedules has fewer than its limit only at the end, however short the pages of the server are."""
    names = [f"s{number}" for number in range(5)]
    asked: list[dict[str, str]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        query = dict(request.url.params)
        asked.append(query)
        rest = [name for name in names if name > query.get("after", "")]
        page: list[dict[str, object]] = [
            {"name": name, "key": "k", "schedule": None, "next_at": None, "paused": False}
            | {"version": 1, "declared_by": None, "recent": []}
            for name in rest[: min(2, int(query["limit"]))]
        ]
        following = page[-1]["name"] if len(rest) > len(page) else None
        return httpx2.Response(200, json={"schedules": page, "next": following})

    schedules = RemoteBackend("http://h", transport=httpx2.MockTransport(answer)).schedules
    assert [stored.name for stored in await schedules.list(limit=4)] == names[:4]
    assert asked == [{"limit": "4"}, {"limit": "2", "after": "s1"}]
    assert [stored.name for stored in await schedules.list(after="s1", limit=9)] == names[2:]


async def test_the_server_applies_a_filter() -> None:
    """A redrive by filter is one request, because the server applies the filter."""
    requests: list[tuple[str, str, object]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append((request.method, request.url.path, json.loads(request.content)))
        return httpx2.Response(200, json={"count": 3})

    backend = RemoteBackend("http://h", transport=httpx2.MockTransport(answer))
    assert await act_on_all(backend.dead_letters, "redrive", "k", 0.0, error="x") == 3
    body = {"filter": {"error": "x"}}
    assert requests == [("POST", "/v1/queues/k/dead-letters/redrive", body)]
