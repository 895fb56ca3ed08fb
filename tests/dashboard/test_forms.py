"""All actions of the dashboard work as plain HTML forms without scripts, and report errors."""

from __future__ import annotations

import re

import httpx2
import pytest

from taskqueue_core.after import After, TaskRef
from taskqueue_core.capabilities import Order, QueueSettings, audit_of
from taskqueue_core.tasks import State
from taskqueue_server.dashboard import settings_form
from tests.dashboard.support import post
from tests.server.support import Running


async def bury(it: Running, *ids: str, error: str = "it broke", key: str = "k") -> None:
    """Create dead letters with these ids."""
    await it.publish(*ids, key=key)
    subscription = it.context.backend.subscribe([key], "worker-1")
    for delivery in (await subscription.receive(len(ids), 1)).deliveries:
        await subscription.dead_letter(delivery, reason="rejected", error=error)  # type: ignore[attr-defined]
    await subscription.close()


async def followed(client: httpx2.AsyncClient, answer: httpx2.Response) -> str:
    """Return the page to which an action redirects, so that a reload does not repeat the action."""
    assert answer.status_code == 303, answer.text
    page = await client.get(answer.headers["location"])
    assert page.status_code == 200
    return page.text


async def test_pausing(it: Running, client: httpx2.AsyncClient) -> None:
    """Delivery and intake can be paused and resumed from the queue page and from the overview."""
    await it.publish("one")
    for what, field in (("deliveries", "paused"), ("intake", "intake_paused")):
        for to, holds in (("paused", True), ("resumed", False)):
            answer = await post(client, "/queues/k/pause", what=what, to=to)
            assert 'id="said"' in await followed(client, answer)
            assert getattr(await it.context.control.settings("k"), field) is holds
    answer = await post(client, "/queues/k/pause", what="deliveries", to="paused", back="overview")
    assert answer.headers["location"] == "/?said=paused"
    assert "Resume</button>" in await followed(client, answer)
    assert (await post(client, "/queues/k/pause", to="neither")).status_code == 422


async def test_pausing_a_tenant(it: Running, client: httpx2.AsyncClient) -> None:
    """U21: a tenant is paused and resumed on the page of a queue with fair order, also one without tasks so far."""
    control = it.context.control
    assert "pause-tenant" not in (await client.get("/queues/k")).text
    await control.configure("k", QueueSettings(order=Order.FAIR))
    page = (await client.get("/queues/k")).text
    assert "pause-tenant" in page
    form = {"what": "tenant", "tenant": "acme"}
    page = await followed(client, await post(client, "/queues/k/pause", **form, to="paused"))
    assert "Tasks of this tenant are accepted and wait." in page
    assert 'aria-label="Resume tenant acme"' in page
    assert (await control.settings("k")).paused_tenants == ("acme",)
    page = await followed(client, await post(client, "/queues/k/pause", **form, to="resumed"))
    assert 'aria-label="Resume tenant acme"' not in page
    assert (await control.settings("k")).paused_tenants == ()
    await control.configure("other", QueueSettings(order=Order.FAIR))
    await it.publish("plain", key="fifo")
    everywhere = form | {"everywhere": "true"}
    page = await followed(client, await post(client, "/queues/k/pause", **everywhere, to="paused"))
    assert "Paused in all queues with fair order: 2." in page
    for key, paused in (("k", ("acme",)), ("other", ("acme",)), ("fifo", ())):
        assert (await control.settings(key)).paused_tenants == paused
    (entry,) = await audit_of(it.backend).entries(limit=1)
    assert (entry.action, entry.key, entry.details) == (
        "pause tenant",
        None,
        "tenant=acme queues=2",
    )
    wrong = await post(client, "/queues/k/pause", what="tenant", tenant="a/b", to="paused")
    assert (wrong.status_code, 'id="tenant-error"' in wrong.text) == (422, True)


async def test_queues_in_which_a_tenant_is_not_paused(
    it: Running, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U21: a pause in all queues names those without fair order that have tasks of the tenant, ten at most."""
    await it.context.control.configure("k", QueueSettings(order=Order.FAIR))
    await it.publish("plain", key="none", tenant="other")
    await it.publish("later", key="a", tenant="acme", not_before=4e9)
    for number in range(9):
        await it.publish("one", key=f"b{number}", tenant="acme")
    form = {"what": "tenant", "tenant": "acme", "everywhere": "true"}
    answer = await post(client, "/queues/k/pause", **form, to="paused")
    (said,) = re.findall(r'id="said" tabindex="-1">(.+?)</p>', answer.text)
    assert said.startswith("Paused in all queues with fair order: 1. Not paused, ")
    assert f": a, {', '.join(f'b{number}' for number in range(9))}. Set the order" in said
    await it.publish("one", key="c", tenant="acme")
    answer = await post(client, "/queues/k/pause", **form, to="paused")
    assert "b8 and 1 more. Set the order" in answer.text
    # Beyond the number of queues that are read, the others count as those that may have such tasks.
    monkeypatch.setattr("taskqueue_server.dashboard.left_out._READ", 10)
    answer = await post(client, "/queues/k/pause", **form, to="paused")
    assert "b8 and 2 more. Set the order" in answer.text
    page = await followed(client, await post(client, "/queues/k/pause", **form, to="resumed"))
    assert "Resumed in all queues with fair order: 1.</p>" in page


def filled(settings: QueueSettings, **changes: str) -> dict[str, str]:
    """Return the fields of the settings form, with some of them changed."""
    changed = {name.replace("__", "."): text for name, text in changes.items()}
    return {**settings_form.fields(settings), "version": str(settings.version), **changed}


async def test_settings(it: Running, client: httpx2.AsyncClient) -> None:
    """The form changes limits, rate and order; settings that it does not contain stay unchanged."""
    control = it.context.control
    before = await control.configure(
        "k", QueueSettings(dedupe_window=77, order=Order.FAIR, weights={"a": 2})
    )
    form = filled(
        before, capacity="100", max_inflight="7", rate_limit__max_tokens="5", rate_limit__interval="2",
        rate_limit__interval_unit="MINUTES", retry__base="0.5", retry__factor="3", retry__delays="1, 30",
    )  # fmt: skip
    page = await followed(client, await post(client, "/queues/k/settings", **form))
    assert "Settings saved." in page
    assert "5 per 2 minutes" in page
    now = await control.settings("k")
    assert (now.capacity, now.max_inflight, now.retry.base) == (100, 7, 0.5)
    assert (now.retry.factor, now.retry.delays) == (3, (1, 30))
    assert now.owners.keys() == {"capacity", "max_inflight", "rate_limit", "retry"}
    assert (now.dedupe_window, now.weights, now.order) == (77, {"a": 2}, Order.FAIR)
    again = filled(now, capacity="", rate_limit__max_tokens="")
    await followed(client, await post(client, "/queues/k/settings", **again))
    now = await control.settings("k")
    assert (now.capacity, now.rate_limit) == (None, None)
    unchanged = await post(client, "/queues/k/settings", **filled(now))
    await followed(client, unchanged)
    assert (await control.settings("k")).version == now.version


@pytest.mark.parametrize(
    ("field", "text"),
    [("capacity", "0"), ("capacity", "many"), ("max_inflight", "-1"), ("max_inflight", "0"),
     ("retry.max_attempts", "1001"), ("rate_limit.max_tokens", "0"), ("rate_limit.max_tokens", "x"),
     ("floor_share", "0.9"), ("floor_share", "nan"), ("order", "random"), ("max_losses", "1e3"),
     ("rate_limit.interval", "-2"), ("retry.delays", "5,x"), ("retry.delays", "5,nan"),
     ("tenant_capacity", "<script>")],
)  # fmt: skip
async def test_wrong_settings(
    it: Running, client: httpx2.AsyncClient, field: str, text: str
) -> None:
    """An invalid value is reported next to its field, other input is kept, and nothing is changed."""
    before = await it.context.control.settings("k")
    form = filled(before) | {"max_processing_time": "60"}
    if field == "rate_limit.interval":
        form["rate_limit.max_tokens"] = "1"
    answer = await post(client, "/queues/k/settings", **(form | {field: text}))
    assert answer.status_code == 422
    assert f'id="h-{field}" class="wrong-value"' in answer.text or field in answer.text
    assert 'value="60"' in answer.text
    assert "<script>" not in answer.text.replace("<script src", "").replace("<script defer", "")
    assert await it.context.control.settings("k") == before


async def test_settings_changed_by_another_operator(
    it: Running, client: httpx2.AsyncClient
) -> None:
    """Law 9: if the settings have changed since the form was loaded, both values are shown and nothing is saved.

    Saving the form again overwrites the other change.
    """
    before = await it.context.control.settings("k")
    form = filled(before, capacity="100")
    await it.context.control.configure("k", before.model_copy(update={"capacity": 50}))
    answer = await post(client, "/queues/k/settings", **form)
    assert answer.status_code == 409
    assert "These settings have changed" in answer.text
    assert 'value="100"' in answer.text
    assert "Current: 50" in answer.text
    assert (await it.context.control.settings("k")).capacity == 50
    form["version"] = "1"
    await followed(client, await post(client, "/queues/k/settings", **form))
    assert (await it.context.control.settings("k")).capacity == 100


async def test_purging(it: Running, client: httpx2.AsyncClient) -> None:
    """Security 3: a purge requires that the operator types the queue name."""
    await it.publish("one", "two")
    for confirm in ("", "K", "other"):
        answer = await post(client, "/queues/k/purge", confirm=confirm)
        assert answer.status_code == 422
        assert await it.count(State.WAITING) == 2
    page = await followed(client, await post(client, "/queues/k/purge", confirm="k"))
    assert "scheduled tasks: 2." in page
    assert await it.count(State.CANCELLED) == 2


async def test_deleting(it: Running, client: httpx2.AsyncClient) -> None:
    """A8, security 3: a deletion requires that the operator types the queue name, and that the queue is not in use."""
    await it.publish("one")
    await it.context.control.configure("k", QueueSettings(capacity=9))
    for confirm in ("", "K", "other"):
        answer = await post(client, "/queues/k/delete", confirm=confirm)
        assert answer.status_code == 422
        assert "Type the name of the queue exactly." in answer.text
    answer = await post(client, "/queues/k/delete", confirm="k")
    assert answer.status_code == 409
    assert "waiting tasks: 1" in answer.text
    assert await it.count(State.WAITING) == 1
    await it.context.control.purge("k")
    page = await followed(client, await post(client, "/queues/k/delete", confirm="k"))
    assert "Deleted." in page
    assert await it.context.control.queues() == ()
    page = await followed(client, await post(client, "/queues/k/delete", confirm="k"))
    assert "the queue does not exist" in page


async def test_dead_letters(it: Running, client: httpx2.AsyncClient) -> None:
    """Dead letters can be redriven one at a time, by selection, by filter or all at once.

    Discarding requires a confirmation.
    """
    await bury(it, "a1", "a2", "a3")
    await bury(it, "b1", "b2", error="timeout " + "x" * 500)
    page = (await client.get("/queues/k/dead")).text
    assert page.count("<tr data-task=") == 5
    assert "x" * 500 in page
    fits = (await client.get("/queues/k/dead", params={"filter": "TIMEOUT"})).text
    assert fits.count("<tr data-task=") == 2
    await followed(client, await post(client, "/queues/k/dead", one="a1"))
    assert await it.count(State.DEAD) == 4
    chosen = await client.post("/queues/k/dead", data={"ids": ["a2", "gone"], "action": "redrive"})
    assert "Redriven: 1." in await followed(client, chosen)
    nothing = await post(client, "/queues/k/dead", action="redrive")
    assert "no task was selected" in await followed(client, nothing)
    pressed = await post(client, "/queues/k/dead", action="nothing", ids="a3")
    assert "no task was selected" in await followed(client, pressed)
    refused = await post(client, "/queues/k/dead", action="discard-all")
    assert refused.status_code == 422
    assert await it.count(State.DEAD) == 3
    some = await post(
        client, "/queues/k/dead", action="discard-all", confirm="discard", filter="timeout"
    )
    await followed(client, some)
    assert (await it.count(State.DEAD), await it.count(State.DISCARDED)) == (1, 2)
    preview = await post(client, "/queues/k/dead", action="redrive-all")
    assert '<span id="touched">1</span>' in preview.text
    assert await it.count(State.DEAD) == 1
    sure = {"action": "redrive-all", "confirm": "redrive"}
    await followed(client, await post(client, "/queues/k/dead", **sure))
    assert await it.count(State.DEAD) == 0
    assert "No dead letters." in (await client.get("/queues/k/dead")).text


async def test_pages_of_dead_letters(it: Running, client: httpx2.AsyncClient) -> None:
    """Dead letters are listed in pages of fifty, each letter once, with and without a filter."""
    await bury(it, *(f"t{number:03}" for number in range(120)))
    for query in ("", "filter=broke"):
        address, seen = f"/queues/k/dead?{query}", list[str]()
        while address:
            page = (await client.get(address)).text
            seen += [part.partition('"')[0] for part in page.split('<tr data-task="')[1:]]
            following = page.partition('<a href="?')[2].partition('" rel="next"')
            href = following[0].replace("&amp;", "&")
            address = f"/queues/k/dead?{href}" if following[1] else ""
        assert seen == [f"t{number:03}" for number in range(120)]


async def test_tasks(it: Running, client: httpx2.AsyncClient) -> None:
    """The page of a task shows its state, and can cancel, redrive or discard it.

    Repeating an action reports that the task has already ended.
    """
    assert (await client.get("/tasks/k/none")).status_code == 404
    await it.publish("one", "two")
    assert (await post(client, "/tasks/k/one", action="cancel")).status_code == 422
    page = await followed(
        client, await post(client, "/tasks/k/one", action="cancel", confirm="cancel")
    )
    assert "Cancelled" in page
    late = await post(client, "/tasks/k/one", action="cancel", confirm="cancel")
    assert "has already ended" in await followed(client, late)
    await it.context.control.cancel("k", "two")
    await bury(it, "three", "four")
    dead = (await client.get("/tasks/k/three")).text
    assert "it broke" in dead
    assert 'id="payload"' in dead
    await it.publish("later", not_before=4e9)
    parents = tuple(TaskRef("k", name) for name in ("three", "later"))
    await it.publish("child", after=After(tasks=parents))
    child = (await client.get("/tasks/k/child")).text.partition('id="waits-for"')[2]
    assert child.partition("</dd>")[0].count('<a href="/tasks/k/') == 2
    assert "(1 held)" in (await client.get("/")).text
    await followed(client, await post(client, "/tasks/k/three", action="redrive"))
    assert await it.count(State.WAITING) == 1
    again = await post(client, "/tasks/k/three", action="redrive")
    assert "no longer a dead letter" in await followed(client, again)
    await followed(client, await post(client, "/tasks/k/four", action="discard", confirm="discard"))
    assert await it.count(State.DISCARDED) == 1
    assert (await post(client, "/tasks/k/four", action="explode")).status_code == 422


async def test_forms_of_other_sites(it: Running, client: httpx2.AsyncClient) -> None:
    """Security 4: forms from pages of other sites are refused, and so are bodies that are not a valid form."""
    await it.publish("one")
    for origin in ("https://evil.example", "null"):
        answer = await client.post(
            "/queues/k/pause", data={"to": "paused"}, headers={"origin": origin}
        )
        assert answer.status_code == 403
    assert not (await it.context.control.settings("k")).paused
    assert (await client.post("/queues/k/pause", json={"to": "paused"})).status_code == 415
    many = "&".join(f"f{number}=1" for number in range(2001))
    kind = {"content-type": "application/x-www-form-urlencoded"}
    assert (await client.post("/queues/k/pause", content=many, headers=kind)).status_code == 400
    assert (
        await client.post("/queues/k/pause", content=b"to=%ff", headers=kind)
    ).status_code == 400
