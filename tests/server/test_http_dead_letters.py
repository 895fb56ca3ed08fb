"""Dead letters over HTTP: listing by page, by id and by filter, redrive and discard."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from taskqueue_core import dead_letter_filter
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import DeadLetter, Task
from taskqueue_memory import MemoryBackend
from tests.server.support import problem
from tests.server.test_http_operations import bury

_URL = "/v1/queues/k/dead-letters"


async def bury_all(backend: MemoryBackend, reasons: dict[str, tuple[str, str]]) -> None:
    """Create dead letters with these reasons and errors, given by task id."""
    await backend.publisher.publish(*(Task(key="k", id=i) for i in reasons))
    subscription = backend.subscribe(["k"], "w")
    for delivery in (await subscription.receive(len(reasons), 0)).deliveries:
        await subscription.dead_letter(delivery, *reasons[delivery.task.id])
    await subscription.close()


async def die(backend: MemoryBackend) -> None:
    """Dead-letter every waiting task again with the same reason and error."""
    async with backend.subscribe(["k"], "w") as subscription:
        for delivery in (await subscription.receive(1000, 0)).deliveries:
            await subscription.dead_letter(delivery, "no", "e")


async def every(api: httpx2.AsyncClient, **query: Any) -> list[list[str]]:
    """Return the ids on each page, following the cursors; the Link header must agree with the body."""
    pages: list[list[str]] = []
    while True:
        answer = await api.get(_URL, params=query)
        body = answer.json()
        pages.append([letter["task"]["id"] for letter in body["dead_letters"]])
        if "next" not in body:
            assert "link" not in answer.headers
            return pages
        query["after"] = body["next"]
        following = answer.links["next"]["url"]
        assert following.startswith(f"{_URL}?")
        assert httpx2.URL(following).params["after"] == body["next"]


class TestPages:
    """C17: a long list of dead letters is returned in pages."""

    async def test_a_cursor_leads_through_all(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """C17, fault K6: the pages contain each dead letter once, oldest first, and the last page has no cursor."""
        await bury(backend, *"abcdef")
        assert await every(api, limit=4) == [list("abcd"), list("ef")]
        assert await every(api, limit=3) == [list("abc"), list("def")]
        assert await every(api, limit=6) == [list("abcdef")]
        assert await every(api, limit=1000) == [list("abcdef")]

    async def test_filters(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """C17: dead letters can be filtered by reason, by text in the last error and by age.

        Conditions are combined with "and".
        """
        await bury_all(
            backend,
            {"a": ("no", "timeout of x"), "b": ("no", "key error"), "c": ("max", "a timeout")},
        )
        assert await every(api, reason="no") == [["a", "b"]]
        assert await every(api, error="timeout") == [["a", "c"]]
        assert await every(api, error="timeout", reason="no") == [["a"]]
        assert await every(api, failed_before=backend.now() + 1) == [["a", "b", "c"]]
        assert await every(api, older_than=3600) == [[]]
        assert await every(api, older_than=0.0) == [["a", "b", "c"]]
        assert await every(api, error="TIMEOUT") == [[]]

    async def test_a_long_list(
        self,
        api: httpx2.AsyncClient,
        backend: MemoryBackend,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Fault K6: one request examines a limited number of dead letters.

        Its cursor continues from there, even if the page is empty.
        """
        asked: list[int] = []
        payload = b'"' + b"x" * 1000 + b'"'

        def letter(n: int) -> DeadLetter:
            task = Task(key="k", id=f"n{n}", payload=payload)
            return DeadLetter(task=task, attempt=1, losses=0, reason="no", failed_at=1)

        async def endless(key: str, *, limit: int, after: str | None = None) -> list[DeadLetter]:
            assert key == "k"
            asked.append(limit)
            start = int((after or "n0")[1:]) + 1
            return [letter(n) for n in range(start, start + limit)]

        monkeypatch.setattr(backend.dead_letters, "list", endless)
        answer = await api.get(_URL, params={"reason": "other"})
        assert answer.json() == {"dead_letters": [], "next": "<1>n10000"}
        assert max(asked) <= 1001
        assert sum(asked) < 10_100
        answer = await api.get(_URL, params={"limit": 1000})
        assert len(answer.json()["dead_letters"]) == 1000
        monkeypatch.setattr(dead_letter_filter, "_PAGE_BYTES", 10_000)
        body = (await api.get(_URL, params={"limit": 1000})).json()
        assert (len(body["dead_letters"]), body["next"]) == (10, "<1>n10")

    async def test_tasks_that_die_again_hide_no_others(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """C17, fault K6: tasks that are redriven from a page and die again move to the end of the list.

        The pages that follow still contain all other dead letters.
        """
        await bury(backend, *"abcdef")
        seen: list[str] = []
        query: dict[str, Any] = {"limit": 2}
        for _ in range(3):
            body = (await api.get(_URL, params=query)).json()
            ids = [letter["task"]["id"] for letter in body["dead_letters"]]
            seen += ids
            await api.post(f"{_URL}/redrive", json={"ids": ids})
            await die(backend)
            query["after"] = body["next"]
        assert sorted(seen) == list("abcdef")

    async def test_places_of_all_kinds(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """C17, fault K2: a task id, even one of maximum length, is accepted as a cursor.

        Text that is neither a cursor nor a known id starts at the beginning.
        """
        long = "z" * LIMITS.name
        await bury(backend, "a", long, "c")
        body = (await api.get(_URL, params={"limit": 2})).json()
        assert body["next"] == long
        for after, rest in (("a", [long, "c"]), (long, ["c"]), ("c", []), ("x", ["a", long, "c"])):
            assert await every(api, after=after) == [rest]
        for after in ("<1>a", "<1:2>a", "<1e>a", "<.:.>a", "<1:2:3>a", "<1>", "<>", "<1"):
            assert await every(api, after=after) == [["a", long, "c"]]

    @pytest.mark.parametrize(
        ("query", "field"),
        [
            ({"older_than": "-1"}, "older_than"),
            ({"older_than": "NaN"}, "older_than"),
            ({"older_than": "inf"}, "older_than"),
            ({"older_than": "1e300"}, "older_than"),
            ({"failed_before": "253402300800"}, "failed_before"),
            ({"failed_before": 1, "older_than": 1}, "older_than"),
            ({"reason": ""}, "reason"),
            ({"error": "x" * 4097}, "error"),
            ({"after": "a b"}, "after"),
            ({"limt": 1}, "query"),
            ([("limit", 1), ("limit", 2)], "query"),
        ],
        ids=str,
    )
    async def test_bad_filters(self, api: httpx2.AsyncClient, query: Any, field: str) -> None:
        """Fault K4: an invalid filter value or an unknown parameter is refused with the name of the parameter."""
        problem(await api.get(_URL, params=query), 422, "invalid_input", field)


class TestOne:
    """C17: operations on a single dead letter."""

    async def test_look_redrive_discard(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """C17, fault K6: a dead letter can be read completely, redriven or discarded by its id.

        For a task that is not dead the count is 0.
        """
        await bury(backend, "a", "b", "redrive")
        answer = await api.get(f"{_URL}/a")
        assert b'"payload":[1,  2]' in answer.content
        assert answer.json()["history"][0]["error"] == "why"
        assert (await api.get(f"{_URL}/redrive")).json()["task"]["id"] == "redrive"
        for count in (1, 0):
            assert (await api.post(f"{_URL}/a/redrive")).json() == {"count": count}
            assert (await api.delete(f"{_URL}/b")).json() == {"count": count}
        problem(await api.get(f"{_URL}/a"), 404, "no_dead_letter")
        problem(await api.get(f"{_URL}/nobody"), 404, "no_dead_letter")
        problem(await api.get(f"{_URL}/%7B%7D"), 422, "invalid_input", "id")
        assert (await api.post(f"{_URL}/nobody/redrive")).json() == {"count": 0}
        ledger = await backend.control.ledger("k")
        assert (ledger.waiting, ledger.discarded, ledger.dead) == (1, 1, 1)


class TestByFilter:
    """C17: redrive and discard of all dead letters that match a filter."""

    async def test_redrive(self, api: httpx2.AsyncClient, backend: MemoryBackend) -> None:
        """C17, fault K6: a redrive by filter affects and counts only matching dead letters.

        A second call finds none.
        """
        reasons = {f"t{n}": ("no", "timeout" if n % 3 else "other") for n in range(250)}
        await bury_all(backend, reasons)
        body = {"filter": {"error": "timeout", "reason": "no"}}
        wanted = sum(error == "timeout" for _, error in reasons.values())
        assert (await api.post(f"{_URL}/redrive", json=body)).json() == {"count": wanted}
        assert (await api.post(f"{_URL}/redrive", json=body)).json() == {"count": 0}
        ledger = await backend.control.ledger("k")
        assert (ledger.waiting, ledger.dead) == (wanted, 250 - wanted)

    async def test_so_many_in_one_call(
        self,
        api: httpx2.AsyncClient,
        backend: MemoryBackend,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Fault K6: one call examines a limited number of dead letters, and the next call continues after them.

        This holds whether the examined letters matched or not.
        """
        monkeypatch.setattr(dead_letter_filter, "_LOOKED_AT", 200)
        reasons = {f"t{n:03}": ("no", "timeout" if n % 2 else "other") for n in range(950)}
        await bury_all(backend, reasons)
        body: dict[str, Any] = {"filter": {"error": "timeout"}}
        counts = []
        while True:
            told = (await api.post(f"{_URL}/redrive", json=body)).json()
            counts.append(told["count"])
            if "next" not in told:
                break
            body["after"] = told["next"]
        assert counts == [100, 100, 100, 100, 75]
        rest = {"filter": {"reason": "no"}}
        counts = []
        while True:
            told = (await api.post(f"{_URL}/discard?confirm=k", json=rest)).json()
            counts.append(told["count"])
            if "next" not in told:
                break
            rest["after"] = told["next"]
        assert sum(counts) == 475
        assert max(counts) <= 200
        assert (await backend.control.ledger("k")).dead == 0

    async def test_what_dies_again_is_not_redriven_again(
        self,
        api: httpx2.AsyncClient,
        backend: MemoryBackend,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Fault K6: a call ignores dead letters that failed after it began; otherwise it might never end."""
        await bury_all(backend, {f"t{n}": ("no", "e") for n in range(150)})
        redrive, rounds = backend.dead_letters.redrive, []

        async def in_vain(key: str, *ids: str) -> int:
            rounds.append(len(ids))
            count = await redrive(key, *ids)
            subscription = backend.subscribe(["k"], "w")
            for delivery in (await subscription.receive(1000, 0)).deliveries:
                await subscription.dead_letter(delivery, "no", "e")
            await subscription.close()
            return count

        monkeypatch.setattr(backend.dead_letters, "redrive", in_vain)
        answer = await api.post(f"{_URL}/redrive", json={"filter": {"reason": "no"}})
        assert answer.json() == {"count": 150}
        assert rounds == [100, 50]

    async def test_what_dies_between_two_calls(
        self,
        api: httpx2.AsyncClient,
        backend: MemoryBackend,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Fault K6: if all redriven tasks die again between two calls, the calls that follow skip none of the others.

        The sequence of calls still comes to an end.
        """
        monkeypatch.setattr(dead_letter_filter, "_LOOKED_AT", 100)
        await bury_all(backend, {f"t{n}": ("no", "e") for n in range(250)})
        body: dict[str, Any] = {"filter": {"error": "e"}}
        counts = []
        while True:
            told = (await api.post(f"{_URL}/redrive", json=body)).json()
            counts.append(told["count"])
            await die(backend)
            if "next" not in told:
                break
            body["after"] = told["next"]
        assert sum(counts) == 250
        letters = await backend.dead_letters.list("k", limit=1000)
        assert [len(letter.history) for letter in letters] == [2] * 250

    @pytest.mark.parametrize(
        ("body", "field"),
        [
            ({"filter": {}}, "filter"),
            ({"filter": {"error": ""}}, "error"),
            ({"filter": {"older_than": -1}}, "older_than"),
            ({"filter": {"older_than": 1, "failed_before": 1}}, "older_than"),
            ({"filter": {"failed_before": 1e18}}, "failed_before"),
            ({"filter": {"reason": "x"}, "all": True}, "all"),
            ({"filter": {"reason": "x"}, "ids": ["a"]}, "all"),
            ({"filter": {"resaon": "x"}}, "filter.resaon"),
            ({"filter": {"reason": "x"}, "after": "a b"}, "after"),
            ({"ids": ["a"], "after": "a"}, "after"),
            ({"all": True, "after": "a"}, "after"),
        ],
        ids=str,
    )
    async def test_nothing_is_not_all(
        self, api: httpx2.AsyncClient, backend: MemoryBackend, body: Any, field: str
    ) -> None:
        """Fault K6: a filter without any condition is refused, because it would match every dead letter."""
        await bury(backend, "a")
        problem(await api.post(f"{_URL}/redrive", json=body), 422, "invalid_input", field)
        answer = await api.post(f"{_URL}/discard", params={"confirm": "k"}, json=body)
        problem(answer, 422, "invalid_input", field)
        assert (await backend.control.ledger("k")).dead == 1

    async def test_to_discard_is_confirmed(
        self, api: httpx2.AsyncClient, backend: MemoryBackend
    ) -> None:
        """Security 3: to discard all dead letters, or those that match a filter, a request must repeat the queue name.

        To discard a list of ids, this is not necessary.
        """
        await bury(backend, "a", "b")
        for body in ({"all": True}, {"filter": {"reason": "no"}}):
            for confirm in ("", "?confirm=", "?confirm=K"):
                answer = await api.post(f"{_URL}/discard{confirm}", json=body)
                problem(answer, 422, "invalid_input", "confirm")
        assert (await api.post(f"{_URL}/discard", json={"ids": ["a"]})).json() == {"count": 1}
        answer = await api.post(f"{_URL}/discard?confirm=k", json={"filter": {"reason": "no"}})
        assert answer.json() == {"count": 1}
