"""The page of the dead letters of all queues: matches by queue, and a redrive after a preview."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from taskqueue_core.capabilities import audit_of
from taskqueue_core.hooks import Identity
from taskqueue_core.tasks import State
from taskqueue_server.dashboard import dead_everywhere, dead_matches
from tests.dashboard.support import Gate, post
from tests.dashboard.test_forms import bury, followed
from tests.server.support import Running

FILTER = {"filter": "timeouterror"}


async def _fill(it: Running) -> None:
    await bury(it, "a1", "a2", "a3", key="mail", error="TimeoutError: of mail")
    await bury(it, "b1", key="orders", error="TimeoutError: of orders")
    await bury(it, "b2", key="orders", error="ValueError: declined")
    await bury(it, "c1", key="reports", error="ValueError: empty")
    await it.publish("fine", key="idle")


def _rows(page: str) -> list[tuple[str, ...]]:
    """Return the queues of the page, each with its numbers."""
    rows = re.findall(r'<tr data-queue="([^"]+)">(.+?)</tr>', page, re.DOTALL)
    return [(key, *re.findall(r'<td class="n">([^<]+)</td>', row)) for key, row in rows]


async def test_matches_of_each_queue(it: Running, client: httpx2.AsyncClient) -> None:
    """U20: the page has the queues with dead letters that match, their number and the newest one; no other is read."""
    assert "No dead letters." in (await client.get("/dead")).text
    await _fill(it)
    read, inner = set[str](), it.context.dead_letters.list

    def counted(key: str, **how: Any) -> Any:
        read.add(key)
        return inner(key, **how)

    it.context.dead_letters.list = counted  # type: ignore[method-assign]
    page = (await client.get("/dead")).text
    assert _rows(page) == [("mail", "3"), ("orders", "2"), ("reports", "1")]
    assert "ValueError: declined" in page
    assert "of orders" not in page
    assert not read
    page = (await client.get("/dead", params=FILTER)).text
    assert _rows(page) == [("mail", "3", "3"), ("orders", "1", "2")]
    assert "of orders" in page
    assert "4 match in 2 queues" in page
    assert 'href="/queues/mail/dead?filter=timeouterror"' in page
    assert read == {"mail", "orders", "reports"}
    assert "No dead letter matches" in (await client.get("/dead?filter=nothing")).text
    for text, keys in (("Worker-1", ["mail", "orders", "reports"]), ("B2", ["orders"])):
        page = (await client.get("/dead", params={"filter": text})).text
        assert [row[0] for row in _rows(page)] == keys
    overview = (await client.get("/")).text
    assert '<a href="/dead"><span data-live="ledger.dead"' in overview


async def test_redrive_in_all_queues(it: Running, client: httpx2.AsyncClient) -> None:
    """U20, U21: a redrive says how many it moves in which queues; later ones stay, and each queue has an entry."""
    await _fill(it)
    preview = (await post(client, "/dead", action="redrive-all", **FILTER)).text
    assert '<span id="touched">4</span>' in preview
    assert re.findall(r'name="keys" value="([^"]+)"', preview) == ["mail", "orders"]
    assert re.findall(r"</a> (\d+)</li>", preview) == ["3", "1"]
    assert await it.count(State.DEAD, "mail") == 3
    (made,) = re.findall(r'name="made" value="([^"]+)"', preview)
    await bury(it, "later", key="mail", error="TimeoutError")
    form: dict[str, Any] = {"action": "redrive-all", "confirm": "redrive", "made": made, **FILTER}
    answer = await client.post("/dead", data={**form, "keys": ["mail", "orders"]})
    assert answer.headers["location"] == "/dead?filter=timeouterror&said=redriven&n=4"
    assert _rows(await followed(client, answer)) == [("mail", "1", "1")]
    assert (await it.count(State.DEAD, "orders"), await it.count(State.DEAD, "reports")) == (1, 1)
    entries = await audit_of(it.backend).entries(limit=9)
    assert sorted((entry.action, entry.key, entry.tasks, entry.details) for entry in entries) == [
        ("redrive", "mail", 3, "filter=timeouterror in all queues"),
        ("redrive", "orders", 1, "filter=timeouterror in all queues"),
    ]
    everything = (await post(client, "/dead", action="redrive-all")).text
    assert '<span id="touched">3</span>' in everything
    nothing = (await post(client, "/dead", action="redrive-all", filter="nothing")).text
    assert "no dead letter matches" in nothing
    wrong = await post(client, "/dead", confirm="redrive", keys="a/b")
    assert wrong.status_code == 422


async def test_bounds(
    it: Running, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U20: of a queue, and in all, a limited number of dead letters is read; the page says what is not counted."""
    await _fill(it)
    monkeypatch.setattr(dead_everywhere, "_MOST_READ", 3)
    page = (await client.get("/dead", params=FILTER)).text
    assert _rows(page) == [("orders", "1", "2"), ("mail", "not read", "3")]
    preview = (await post(client, "/dead", action="redrive-all", **FILTER)).text
    assert re.findall(r'name="keys" value="([^"]+)"', preview) == ["orders"]
    assert "1 more queues have dead letters" in preview
    monkeypatch.undo()
    monkeypatch.setattr(dead_matches, "IN_ONE", 2)
    page = (await client.get("/dead", params=FILTER)).text
    assert _rows(page) == [("mail", "at least 2", "3"), ("orders", "1", "2")]
    assert "up to 10,000 are read" in page
    monkeypatch.setattr(dead_everywhere, "_QUEUES", 2)
    page = (await client.get("/dead")).text
    assert [row[0] for row in _rows(page)] == ["orders", "reports"]
    assert "1 more queues have dead letters" in page


@pytest.mark.parametrize("verbs", [("admin",), ("observe",)])
async def test_only_permitted_queues(
    it: Running, client: httpx2.AsyncClient, verbs: Sequence[str]
) -> None:
    """Security 2: a token for some queues sees and redrives only their dead letters; ``observe`` has no button."""
    token = Identity(name="some", verbs=frozenset(verbs), keys=("mail",))
    it.context.hooks.register(Gate(secret=token))
    await _fill(it)
    assert (await post(client, "/login", token="secret")).status_code == 303
    page = (await client.get("/dead")).text
    assert _rows(page) == [("mail", "3")]
    assert ("redrive-all" in page) == (verbs == ("admin",))
    form: dict[str, Any] = {"action": "redrive-all", "confirm": "redrive"}
    own = {"origin": it.server.url}
    answer = await client.post("/dead", data={**form, "keys": ["mail", "orders"]}, headers=own)
    assert answer.status_code == 403
    assert await it.count(State.DEAD, "mail") == 3
