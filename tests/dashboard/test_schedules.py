"""The pages of schedules: the list and one schedule, with their actions, as a browser without scripts uses them."""

from __future__ import annotations

from datetime import UTC, datetime

import httpx2

from taskqueue_core import Cron, Every, Schedule, TaskTemplate
from taskqueue_core.capabilities import Fire, QueueSettings, Skip, StoredSchedule, schedules_of
from tests.dashboard.support import post
from tests.server.support import Running

HOSTILE = "<script>alert(1)</script>"
MAIL = TaskTemplate.of("k", {"text": HOSTILE})


async def fill(it: Running) -> None:
    """Put a schedule that fires, one with skipped instants, a paused one, an ended one, and one that is damaged."""
    schedules = it.context.queue.schedules
    await schedules.put(
        Schedule("digest", Cron("0 9 * * MON-FRI", "Europe/Berlin"), MAIL, jitter=30)
    )
    await schedules.trigger("digest")
    await schedules.put(Schedule("sweep", Every(90), MAIL, catch_up="none"))
    store = schedules_of(it.context.backend)
    stored = await store.get("sweep")
    assert stored is not None
    skipped = (
        Skip(1_700_000_000.0, "missed", 7),
        Skip(1_700_000_600.0, "queue_full"),
        Skip(1_700_000_900.0, "late"),
    )
    fire = Fire(
        key="k",
        name="sweep",
        version=stored.version,
        planned_for=stored.next_at,
        next_at=stored.next_at,
        skipped=skipped,
    )
    await store.fire(fire)
    await schedules.put(Schedule("paused", Cron("@daily"), MAIL, paused=True))
    ended = datetime(2020, 1, 1, tzinfo=UTC)
    await schedules.put(Schedule("ended", Cron("@daily"), MAIL, ends=ended))
    await store.put(StoredSchedule(key="k", name="damaged", spec=b'{"v":"<b>"}'))


async def test_the_list_shows_next_and_last_instants(
    it: Running, client: httpx2.AsyncClient
) -> None:
    """U13: each schedule has its times, its state, its next instant and what became of the last one."""
    assert "No schedules yet" in (await client.get("/schedules")).text
    await fill(it)
    page = (await client.get("/schedules")).text
    rows = {row.partition('"')[0]: row for row in page.split('data-schedule="')[1:]}
    assert set(rows) == {"damaged", "digest", "ended", "paused", "sweep"}
    assert "0 9 * * MON-FRI (Europe/Berlin)" in rows["digest"]
    assert ", accepted" in rows["digest"]
    assert "every 1.5 min" in rows["sweep"]
    assert ", late" in rows["sweep"]
    states = {"digest": "Active", "paused": "Paused", "ended": "Ended", "damaged": "Cannot be read"}
    for name, state in states.items():
        assert f">{state}</span>" in rows[name], rows[name]
    assert 'value="resume"' in rows["paused"]
    assert 'value="pause"' in rows["digest"]
    assert "<button" not in rows["damaged"]


async def test_a_page_shows_what_was_skipped_and_why(
    it: Running, client: httpx2.AsyncClient
) -> None:
    """U13: the next instants, the last ones, why no task was published, and the payload, escaped."""
    await fill(it)
    page = (await client.get("/schedules/sweep")).text
    assert page.count("<li>") == 10
    assert "2023-11-14 22:13:20 UTC and 6 more" in page
    assert "no server or worker ran" in page
    assert "it was too late" in page
    assert "the queue refused the task" in page
    page = (await client.get("/schedules/digest")).text
    assert 'href="/tasks/k/digest.' in page
    assert "up to 30 s" in page
    assert HOSTILE not in page
    assert "&lt;script&gt;" in page
    page = (await client.get("/schedules/damaged")).text
    assert "cannot be read, so it does not fire" in page
    assert "<b>" not in page.replace("<b>Not live</b>", "")
    assert "There are none." in (await client.get("/schedules/ended")).text
    assert "If it is resumed" in (await client.get("/schedules/paused")).text
    assert (await client.get("/schedules/unknown")).status_code == 404


async def act(client: httpx2.AsyncClient, action: str) -> str:
    """Press a button of the page, and return the page to which it leads."""
    answer = await post(client, "/schedules/digest", action=action)
    assert answer.status_code == 303, answer.text
    return (await client.get(answer.headers["location"])).text


async def test_run_now_pause_and_resume(it: Running, client: httpx2.AsyncClient) -> None:
    """U13: operators run a schedule now, pause it and resume it; a refusal is shown."""
    schedules = it.context.queue.schedules
    await schedules.put(Schedule("digest", Cron("@yearly"), MAIL))
    assert "Published: the task waits" in await act(client, "run")
    assert (await it.ledger()).published == 1
    assert "has not ended" in await act(client, "run")
    assert (await it.ledger()).published == 1
    assert "Paused. The schedule" in await act(client, "pause")
    found = await schedules.get("digest")
    assert found is not None
    assert found.paused
    assert "Resumed. The schedule" in await act(client, "resume")
    assert (await post(client, "/schedules/digest", action="explode")).status_code == 422
    assert (await post(client, "/schedules/unknown", action="run")).status_code == 404
    await it.context.control.purge("k")
    await it.context.control.configure("k", QueueSettings(intake_paused=True))
    answer = await post(client, "/schedules/digest", action="run")
    assert answer.status_code == 409
    assert "Nothing was published" in answer.text


async def test_many_schedules_have_pages(it: Running, client: httpx2.AsyncClient) -> None:
    """U13: a page shows 50 schedules, and links to the next one."""
    for number in range(120):
        await it.context.queue.schedules.put(Schedule(f"s{number:03}", Every(3600), MAIL))
    page = (await client.get("/schedules")).text
    assert page.count("data-schedule=") == 50
    assert "?after=s049" in page
    page = (await client.get("/schedules?after=s099")).text
    assert page.count("data-schedule=") == 20
    assert 'rel="next"' not in page
    assert "No more schedules" in (await client.get("/schedules?after=t")).text
