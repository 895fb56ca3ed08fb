"""Publishing through a server: the result of each response, and of each missing response."""

import json
from collections.abc import Callable

import httpx2
import msgspec
import pytest

from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    LeaseLost,
    PublishUnconfirmed,
)
from taskqueue_core.queue import Queue
from taskqueue_core.tasks import Confirmation, Published, Refusal, Task
from taskqueue_remote import RemoteBackend
from taskqueue_remote.client import TIME_HEADER

Handler = Callable[[httpx2.Request], httpx2.Response]
URL = "http://127.0.0.1:9"


def remote(handler: Handler) -> RemoteBackend:
    """Return a backend whose server is a function."""
    return RemoteBackend(URL, "secret", transport=httpx2.MockTransport(handler))


def accepting(request: httpx2.Request) -> httpx2.Response:
    """Return a response that accepts every task."""
    lines = [json.loads(line) for line in request.content.split(b"\n")]
    answers = [{"key": t["key"], "task_id": t["id"], "status": "accepted"} for t in lines]
    return httpx2.Response(200, content=b"".join(msgspec.json.encode(a) + b"\n" for a in answers))


def problem(status: int, code: str, **more: object) -> httpx2.Response:
    """Return a problem document as the server sends it."""
    told = {"type": "about:blank", "title": "x", "status": status, "code": code, "detail": "why"}
    return httpx2.Response(status, json=told | more)


async def test_a_payload_travels_as_the_bytes_it_is() -> None:
    """A payload is sent byte for byte: number formats, field order and spaces do not change."""
    seen: list[bytes] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.content)
        return accepting(request)

    payload = b'{"b": 1.50, "a":[ 12345678901234567890 ]}'
    await remote(handler).publisher.publish(Task(key="k", id="1", payload=payload))
    assert payload in seen[0]


async def test_a_payload_over_several_lines_stays_one_task() -> None:
    """D1: line breaks inside a payload do not split its line of a batch."""
    seen: list[bytes] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.content)
        return accepting(request)

    tasks = [Task(key="k", id=str(n), payload=b'{\r\n "a":\n"x\\ny"\n}') for n in range(2)]
    confirmations = await remote(handler).publisher.publish(*tasks)
    assert [c.status for c in confirmations] == [Published.ACCEPTED] * 2
    lines = seen[0].split(b"\n")
    assert [json.loads(line)["payload"] for line in lines] == [{"a": "x\ny"}] * 2


async def test_requests_stay_small() -> None:
    """A large batch is split by number of tasks and by bytes, and the confirmations keep its order."""
    sizes: list[tuple[int, int]] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        sizes.append((request.content.count(b"\n") + 1, len(request.content)))
        return accepting(request)

    backend = remote(handler)
    small = [Task(key="k", id=f"s{n}") for n in range(2500)]
    large = [Task(key="k", id=f"l{n}", payload=b'"' + b"x" * 250_000 + b'"') for n in range(70)]
    for tasks in (small, large):
        confirmations = await backend.publisher.publish(*tasks)
        assert [c.task_id for c in confirmations] == [t.id for t in tasks]
    assert [count for count, _ in sizes[:3]] == [1000, 1000, 500]
    assert len(sizes) > 4
    assert all(size <= 8 * 1024 * 1024 for _, size in sizes)


@pytest.mark.parametrize("error", [httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout])
async def test_what_was_never_sent_is_unavailable(error: type[httpx2.TransportError]) -> None:
    """D1: if no connection can be made, nothing was stored, and the error says that the backend is unavailable."""

    def handler(request: httpx2.Request) -> httpx2.Response:
        raise error("no", request=request)

    with pytest.raises(BackendUnavailable, match="taskqueue serve"):
        await remote(handler).publisher.publish(Task(key="k"))


@pytest.mark.parametrize(
    "error",
    [httpx2.ReadTimeout, httpx2.WriteTimeout, httpx2.ReadError, httpx2.RemoteProtocolError],
)
async def test_a_lost_answer_is_unconfirmed(error: type[httpx2.TransportError]) -> None:
    """D1: if the response is lost, the task may have been stored, so the publish is unconfirmed and not repeated."""
    calls = 0

    def handler(request: httpx2.Request) -> httpx2.Response:
        nonlocal calls
        calls += 1
        raise error("lost", request=request)

    with pytest.raises(PublishUnconfirmed):
        await remote(handler).publisher.publish(Task(key="k"))
    assert calls == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (problem(503, "backend_unavailable"), BackendUnavailable),
        (problem(503, "publish_unconfirmed"), PublishUnconfirmed),
        (problem(500, "internal"), PublishUnconfirmed),
        (httpx2.Response(502, text="bad gateway"), PublishUnconfirmed),
        (httpx2.Response(504), PublishUnconfirmed),
        (httpx2.Response(503), BackendUnavailable),
        (problem(401, "unauthenticated"), ConfigurationError),
        (httpx2.Response(404, text="<html>"), ConfigurationError),
        (httpx2.Response(301, headers={"location": "/x"}), ConfigurationError),
        (httpx2.Response(200, text="<html>hello</html>"), PublishUnconfirmed),
        (httpx2.Response(200, text=""), PublishUnconfirmed),
        (
            httpx2.Response(200, text='{"status":"accepted","key":"k","task_id":"other"}'),
            PublishUnconfirmed,
        ),
        (
            httpx2.Response(200, text='{"status":"perhaps","key":"k","task_id":"1"}'),
            PublishUnconfirmed,
        ),
    ],
)
async def test_each_failing_answer_has_its_error(
    answer: httpx2.Response, error: type[Exception]
) -> None:
    """D1: a publish counts as accepted only if the response confirms exactly this task."""
    with pytest.raises(error):
        await remote(lambda _: answer).publisher.publish(Task(key="k", id="1"))


@pytest.mark.parametrize("failure", ["lost", 401, 429, 503])
async def test_a_batch_that_broke_off_is_unconfirmed(failure: str | int) -> None:
    """D1: if the first request of a batch is confirmed and the second fails, the batch is unconfirmed."""
    calls = 0

    def handler(request: httpx2.Request) -> httpx2.Response:
        nonlocal calls
        calls += 1
        if calls == 1:
            return accepting(request)
        if isinstance(failure, int):
            return httpx2.Response(failure)
        raise httpx2.ConnectError("no", request=request)

    with pytest.raises(PublishUnconfirmed, match="some tasks of the call were stored"):
        await remote(handler).publisher.publish(*(Task(key="k") for _ in range(1001)))


async def test_sending_again_uses_the_same_ids() -> None:
    """D1: a publish without a response is sent again unchanged, and the later confirmation is returned."""
    bodies: list[bytes] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        bodies.append(request.content)
        if len(bodies) < 3:
            raise httpx2.ReadTimeout("slow", request=request)
        return accepting(request)

    confirmation = await Queue(remote(handler)).publish("k", {"n": 1})
    assert confirmation.status is Published.ACCEPTED
    assert len(bodies) == 3
    assert len(set(bodies)) == 1


async def test_a_line_that_the_server_finds_invalid_is_refused() -> None:
    """A task that the server finds invalid is refused, and the other tasks of the batch are confirmed."""
    first = '{"line":1,"status":"invalid","code":"invalid_input","field":"key","detail":"too long"}'
    second = '{"key":"k","task_id":"2","status":"duplicate","position":4}'
    backend = remote(lambda _: httpx2.Response(200, text=f"{first}\n{second}\n"))
    one, two = await backend.publisher.publish(Task(key="k", id="1"), Task(key="k", id="2"))
    assert (one.status, one.reason) == (Published.REFUSED, "invalid_input: too long")
    assert one.retry_after is None
    assert (two.status, two.position) == (Published.DUPLICATE, 4)


@pytest.mark.parametrize("code", [*Refusal, "of_a_newer_server", None])
async def test_a_refusal_keeps_its_parts(code: str | None) -> None:
    """B13: a refusal keeps its code, reason, depth and retry time.

    An unknown code of a newer server is still a refusal.
    """
    told = {"key": "k", "task_id": "1", "status": "refused", "code": code, "reason": "no room"}
    line = json.dumps(told | {"retry_after": 0.5, "depth": 7})
    (one,) = await remote(lambda _: httpx2.Response(200, text=line)).publisher.publish(
        Task(key="k", id="1")
    )
    assert one == Confirmation(
        key="k",
        task_id="1",
        status=Published.REFUSED,
        code=Refusal(code) if code in set(Refusal) else None,
        reason="no room",
        retry_after=0.5,
        depth=7,
    )


async def test_a_retry_is_scheduled_without_a_delivery() -> None:
    """G2: a retry can be scheduled over HTTP without a delivery, and its token makes the request idempotent."""
    seen: list[dict[str, object]] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append({"path": request.url.path} | json.loads(request.content))
        return httpx2.Response(201, json={"key": "k", "task_id": "1", "status": "accepted"})

    task = Task(key="k", id="1", payload=b"[1]")
    retry = remote(handler).publisher.schedule_retry
    confirmation = await retry(task, 12.5, error="E", token="t")
    assert confirmation.status is Published.ACCEPTED
    (sent,) = seen
    assert (sent["path"], sent["at"], sent["error"], sent["token"]) == (
        "/v1/retries",
        12.5,
        "E",
        "t",
    )
    assert sent["task"] == {"id": "1", "key": "k", "payload": [1]}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (httpx2.Response(500), PublishUnconfirmed),
        (problem(503, "backend_unavailable"), BackendUnavailable),
        (problem(409, "lease_lost"), LeaseLost),
        (httpx2.Response(201, text="?"), PublishUnconfirmed),
    ],
)
async def test_each_failing_retry_has_its_error(
    answer: httpx2.Response, error: type[Exception]
) -> None:
    """D1: a retry counts as scheduled only if the server confirms it."""
    with pytest.raises(error):
        await remote(lambda _: answer).publisher.schedule_retry(Task(key="k"), 1.0)


async def test_the_token_is_shown_to_the_server_only() -> None:
    """The token is sent in its header, and no error contains it."""
    seen: list[str] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers["authorization"])
        return problem(403, "forbidden")

    with pytest.raises(ConfigurationError) as caught:
        await remote(handler).publisher.publish(Task(key="k"))
    assert seen == ["Bearer secret"]
    assert "secret" not in str(caught.value)


async def test_a_delay_counts_from_the_servers_time() -> None:
    """Law 8: a delay counts from the time of the server, even in the first call and with a wrong local clock."""
    sent: list[dict[str, float]] = []

    def handler(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/ready":
            return httpx2.Response(200, json={"ready": True}, headers={TIME_HEADER: "5000.0"})
        sent.append(json.loads(request.content))
        return accepting(request)

    await Queue(remote(handler)).publish("k", delay=60, expires_in=120)
    assert (round(sent[0]["not_before"]), round(sent[0]["deadline"])) == (5060, 5120)
