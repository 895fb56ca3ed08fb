"""``taskqueue schedule``: each of its commands, on a shared store."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from taskqueue_core import Every, Queue, Schedule, TaskTemplate
from taskqueue_core.capabilities import QueueSettings, StoredSchedule
from tests.cli.conftest import Cli
from tests.cli.shared import Shared

PUT = ("schedule", "put", "digest", "--key", "mail")
DAILY = (*PUT, "--cron", "@daily")


def test_a_schedule_is_put_and_shown(cli: Cli) -> None:
    """U13: put, list and show, with the options of the task."""
    assert "No schedules yet" in cli("schedule", "list").out
    options: tuple[str, ...] = (
        "--timezone",
        "Europe/Berlin",
        "--catch-up",
        "all",
        "--overlap",
        "wait",
        "--jitter",
        "5",
    )
    options += ("--header", "a=b", "--instant", "at", "--instant", "n=seconds", "--priority", "7")
    options += ("--tag", "user:42")
    options += (
        "--starts",
        "2026-01-01T00:00:00+01:00",
        "--ends",
        "4000000000",
        "--expires-in",
        "60",
    )
    done = cli(*PUT, '{"to": "ada"}', "--cron", "0 9 * * MON-FRI", *options, "--json")
    assert done.code == 0, done.err
    made = done.json
    assert (made["name"], made["key"], made["version"]) == ("digest", "mail", 1)
    assert made["schedule"]["when"]["timezone"] == "Europe/Berlin"
    call = made["schedule"]["call"]
    assert call["payload"] == {"to": "ada"}
    assert call["instants"] == {"at": "text", "n": "seconds"}
    assert (call["headers"], call["priority"], call["expires_in"]) == ({"a": "b"}, 7, 60)
    assert call["tags"] == ["user:42"]
    assert made["schedule"]["starts"] == "2026-01-01T00:00:00+01:00"
    assert made["schedule"]["ends"] == "2096-10-02T07:06:40Z"
    assert cli("schedule", "show", "digest", "--json").json == made
    shown = cli("schedule", "show", "digest").out
    assert "0 9 * * MON-FRI (Europe/Berlin)" in shown
    assert '{"to":"ada"}' in shown.replace('": "', '":"')
    listed = cli("schedule", "list").out
    assert "digest" in listed
    assert "mail" in listed
    assert [each["name"] for each in cli("schedule", "list", "--json").json] == ["digest"]


def test_versions(cli: Cli) -> None:
    """U13: with a version, a put or a delete of a schedule that has changed is refused."""
    assert cli(*DAILY, "--version", "0").code == 0
    assert cli(*DAILY, "--late", "60", "--version", "0").code == 1
    assert cli(*DAILY, "--late", "60", "--version", "1").code == 0
    assert cli("schedule", "delete", "digest", "--yes", "--version", "1").code == 1
    assert cli("schedule", "delete", "digest", "--yes", "--json").json["deleted"]
    assert "nothing was deleted" in cli("schedule", "delete", "digest", "--yes").err
    assert cli("schedule", "delete", "digest").code == 2  # there is nobody to ask


def test_pause_resume_and_next(cli: Cli) -> None:
    """U13: a paused schedule shows the instants that would come."""
    cli(*PUT, "--every", "3600", "--since", "2026-01-01T00:30:00Z")
    paused = cli("schedule", "pause", "digest", "--json").json
    assert (paused["paused"], paused["next_at"]) == (True, None)
    assert "paused" in cli("schedule", "show", "digest").out
    instants = cli("schedule", "next", "digest", "-n", "3", "--json").json
    assert [instant - instants[0] for instant in instants] == [0, 3600, 7200]
    assert instants[0] % 3600 == 1800
    assert len(cli("schedule", "next", "digest").out.splitlines()) == 5
    assert not cli("schedule", "resume", "digest", "--json").json["paused"]


def test_run_and_backfill(cli: Cli) -> None:
    """U13: run now, once while the task lives; the instants of two days, of which one is there already."""
    cli(*DAILY)
    assert "accepted  digest.20" in cli("schedule", "run", "digest").out
    assert "has not ended" in cli("schedule", "run", "digest").out
    assert (
        cli("schedule", "run", "digest", "--overlap", "allow", "--json").json["status"]
        == "accepted"
    )
    since, until = "2026-01-01T00:00:00Z", "2026-01-03T00:00:00Z"
    done = cli("schedule", "backfill", "digest", since, until)
    assert "instants: 2 (accepted 2)" in done.out
    seconds = str(datetime(2026, 1, 2, tzinfo=UTC).timestamp())
    done = cli("schedule", "backfill", "digest", seconds, "2026-01-03T02:00:00+01:00", "--json")
    assert [each["status"] for each in done.json] == ["duplicate", "accepted"]
    shown = cli("schedule", "show", "digest").out
    assert "overlap" in shown


async def _fill(store: Shared) -> None:
    await Queue(store).schedules.put(Schedule("s", Every(60), TaskTemplate.of("mail")))
    await store.control.configure("mail", QueueSettings(capacity=1))
    await store.schedules.put(StoredSchedule(key="mail", name="odd", spec=b"{}"))


def test_a_refusal_and_a_damaged_schedule(cli: Cli, store: Shared) -> None:
    """U13: a full queue is exit code 1 with the reason; a damaged schedule is listed with its problem."""
    asyncio.run(_fill(store))
    assert cli("schedule", "run", "s").code == 0
    done = cli("schedule", "run", "s", "--overlap", "allow")
    assert done.code == 1
    assert "refused" in done.err
    done = cli("schedule", "backfill", "s", "2026-01-01T00:00:00Z", "2026-01-01T00:05:00Z")
    assert done.code == 1
    assert "refused 1" in done.out
    assert "cannot be read" in cli("schedule", "list").out
    assert "problem" in cli("schedule", "show", "odd").out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((*PUT, "--cron", "61 * * * *"), "expression"),
        ((*PUT, "--cron", "@daily", "--timezone", "Mars/Olympus"), "timezone"),
        ((*PUT, "--every", "0.5"), "seconds"),
        ((*PUT, "--every", "60", "--since", "soon"), "since"),
        ((*PUT, "--every", "60", "--starts", "2026-01-01"), "starts: got a time without a time zone"),
        ((*PUT, "--every", "60", "--cron", "@daily"), "--cron"),
        (PUT, "--cron"),
        ((*PUT, "--every", "60", "--timezone", "UTC"), "--timezone"),
        ((*DAILY, "--since", "2026-01-01T00:00:00Z"), "--since"),
        ((*DAILY, "--late", "0"), "late"),
        ((*DAILY, "--instant", "at=date"), "instants"),
        ((*DAILY, "{"), "payload"),
        (("schedule", "put", "two words", "--key", "mail", "--cron", "@daily"), "name"),
        (("schedule", "show", "missing"), "NAME"),
        (("schedule", "pause", "missing"), "name"),
        (("schedule", "backfill", "missing", "20260101", "20260102"), "SINCE"),
    ],
)  # fmt: skip
def test_bad_input_is_named(cli: Cli, store: Shared, words: tuple[str, ...], fault: str) -> None:
    """U13: exit code 2, the field's name, and nothing is stored."""
    done = cli(*words)
    assert done.code == 2, done.out
    assert fault in done.err
    assert asyncio.run(store.schedules.list()) == ()
