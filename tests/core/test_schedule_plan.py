"""What a schedule does when its time has come: which instants are published, and which are skipped."""

from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskqueue_core.errors import InvalidInput, TooLarge
from taskqueue_core.schedules import (
    CATCH_UP,
    Cron,
    Every,
    Plan,
    Schedule,
    Skipped,
    SkipReason,
    Spec,
    TaskTemplate,
    next_instant,
    plan,
    scheduled_task,
    text_of,
)
from taskqueue_core.schedules.schedule import CatchUp, Overlap
from taskqueue_core.uniqueness import Debounce, OnConflict, UniqueKey, Until

MAIL = TaskTemplate.of("mail", {"to": "ada"})
MINUTE = 60.0
catch_ups = st.sampled_from(get_args(CatchUp))


def every_minute(**options: Any) -> Schedule:
    """Return a schedule with an instant at every full minute."""
    return Schedule("reminder", Every(MINUTE), MAIL, **options)


def instants_between(schedule: Schedule, first: float, last: float) -> list[float]:
    """Return the instants from ``first``, which is one, to ``last``."""
    found = []
    instant: float | None = first
    while instant is not None and instant <= last:
        found.append(instant)
        instant = next_instant(schedule, instant)
    return found


@pytest.mark.parametrize("catch_up", get_args(CatchUp))
def test_an_instant_that_has_just_come_is_published(catch_up: CatchUp) -> None:
    """U13: nothing was missed, so the catch-up does not matter."""
    schedule = every_minute(catch_up=catch_up)
    assert plan(schedule, 600.0, 599.9) is None
    assert plan(schedule, 600.0, 600.0) == Plan((600.0,), 660.0)
    assert plan(schedule, 600.0, 659.9) == Plan((600.0,), 660.0)


def test_catch_up_decides_about_missed_instants() -> None:
    """U13: after two hours without a server, all, the last or none of the instants of the last hour are made up for."""
    late = Skipped(SkipReason.LATE, 61, 600.0, 4260.0)
    everything = plan(every_minute(catch_up="all"), 600.0, 7859.0)
    assert everything == Plan(tuple(600.0 + n * 60 for n in range(61, 121)), 7860.0, (late,))
    missed = Skipped(SkipReason.MISSED, 59, 4260.0, 7800.0)
    assert plan(every_minute(), 600.0, 7859.0) == Plan((7800.0,), 7860.0, (late, missed))
    daily = Schedule("report", Every(86_400), MAIL, catch_up="none")
    missed = Skipped(SkipReason.MISSED, 1, 86_400.0, 172_800.0)
    assert plan(daily, 86_400.0, 86_400.0 + 61) == Plan((), 172_800.0, (missed,))
    assert plan(daily, 86_400.0, 86_400.0 + 60) == Plan((86_400.0,), 172_800.0)


def test_what_the_queue_refused_is_skipped_for_this_reason() -> None:
    """U13: instants up to the last refusal were refused; later ones are late or missed."""
    schedule = every_minute(catch_up="none")

    def skipped(now: float, refused: float) -> list[tuple[SkipReason, int, float]]:
        found = plan(schedule, 600.0, now, refused)
        assert found is not None
        return [(one.reason, one.count, one.first) for one in found.skipped]

    assert skipped(600.0 + 3601, 600.0)[0] == (SkipReason.REFUSED, 1, 600.0)
    assert skipped(665.0, 600.0) == [(SkipReason.REFUSED, 1, 600.0)]
    assert skipped(600.0 + 7230, 720.0) == [
        (SkipReason.REFUSED, 3, 600.0),
        (SkipReason.LATE, 58, 780.0),
        (SkipReason.MISSED, 59, 4260.0),
    ]
    assert skipped(600.0 + 7230, 4800.0) == [
        (SkipReason.REFUSED, 71, 600.0),
        (SkipReason.MISSED, 49, 4860.0),
    ]
    assert skipped(665.0, 660.0) == [(SkipReason.REFUSED, 1, 600.0)]
    assert skipped(665.0, 540.0) == [(SkipReason.MISSED, 1, 600.0)]


def test_no_more_than_a_thousand_instants_are_made_up_for() -> None:
    """U13: of ten years of missed minutes, the last 1,000 are published; the others are skipped, with a reason."""
    now = 10 * 366 * 86_400.0
    found = plan(every_minute(catch_up="all", late=now + 1), 0.0, now)
    assert found is not None
    assert len(found.instants) == CATCH_UP
    assert found.instants[-1] == now
    (skipped,) = found.skipped
    assert (skipped.reason, skipped.first, skipped.before) == (
        SkipReason.TOO_MANY,
        0.0,
        found.instants[0],
    )
    assert skipped.count == now // 60 + 1 - CATCH_UP
    # A cron expression whose instants are all in one month, and long ago.
    crowded = Schedule("c", Cron("* * * 1 *", "Europe/Berlin"), MAIL, catch_up="all", late=now + 1)
    first = next_instant(crowded, 0.0)
    assert first is not None
    found = plan(crowded, first, datetime(1979, 10, 1, tzinfo=UTC).timestamp())
    assert found is not None
    assert found.instants[-1] == datetime(1979, 1, 31, 22, 59, tzinfo=UTC).timestamp()
    assert len(found.instants) == CATCH_UP
    assert found.skipped == (
        Skipped(SkipReason.TOO_MANY, CATCH_UP, first, found.instants[0], at_least=True),
    )


@settings(deadline=None, max_examples=50)
@given(
    st.one_of(
        st.integers(20, 5000).map(Every),
        st.sampled_from(["* * * * *", "*/7 3 * * *", "0 */2 * * *", "30 2 * * *"]).map(
            lambda expression: Cron(expression, "Europe/Berlin")
        ),
    ),
    catch_ups,
    st.integers(1, 200_000),
    st.integers(1_774_000_000, 1_775_000_000),  # with a change of the clock
    st.integers(0, 80_000),
)
def test_a_plan_has_each_due_instant_once(
    when: Every | Cron, catch_up: CatchUp, late: int, start: int, passed: int
) -> None:
    """U14: an instant up to now is published or skipped, and the next one is later than now."""
    schedule = Schedule("s", when, MAIL, catch_up=catch_up, late=late)
    first = next_instant(schedule, start)
    assert first is not None
    now = start + passed + 0.5
    due = instants_between(schedule, first, now)
    found = plan(schedule, first, now)
    if not due:
        assert found is None
        return
    assert found is not None
    assert found.next_at == next_instant(schedule, now)
    assert list(found.instants) == due[len(due) - len(found.instants) :]
    assert all(now - instant < late for instant in found.instants)
    rest = due[: len(due) - len(found.instants)]
    for group in found.skipped:
        inside = [instant for instant in rest if group.first <= instant < group.before]
        assert inside[0] == group.first
        assert group.count == (CATCH_UP if group.at_least else len(inside))
        assert len(inside) >= group.count
        is_late = group.reason is SkipReason.LATE
        assert all((now - instant >= late) is is_late for instant in inside)
        rest = [instant for instant in rest if instant not in inside]
    assert rest == []


def test_a_schedule_starts_and_ends() -> None:
    """U13: there is no instant before the start, and none at the end or later."""
    starts, ends = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 3, tzinfo=UTC)
    schedule = Schedule("s", Cron("@daily"), MAIL, starts=starts, ends=ends)
    first = next_instant(schedule, 0.0)
    assert first == starts.timestamp()
    second = next_instant(schedule, first)
    assert second == first + 86_400
    assert next_instant(schedule, second) is None
    assert plan(schedule, second, second) == Plan((second,), None)
    late = plan(schedule, first, second + 7200)
    assert late is not None
    assert late.instants == ()
    assert late.next_at is None
    assert sum(group.count for group in late.skipped) == 2
    daily = Schedule("s", Every(86_400), MAIL, starts=starts, ends=ends)
    long_after = plan(daily, first, second + 30 * 86_400)
    assert long_after == Plan((), None, (Skipped(SkipReason.LATE, 2, first, ends.timestamp()),))


def test_the_task_of_an_instant_is_the_same_in_each_process() -> None:
    """U14: its id, payload, headers and times follow from the schedule and the instant."""
    template = TaskTemplate.of(
        "mail",
        {"to": "ada", "at": None},
        headers={"trace": "1"},
        priority=7,
        tenant="acme",
        expires_in=60,
        instants={"at": "text", "number": "seconds"},
    )
    schedule = Schedule("digest", Every(1.5), template, jitter=100)
    task = scheduled_task(schedule, 1_774_744_201.5)
    assert task.id == "digest.2026-03-29T00:30:01.500Z"
    assert task.value() == {
        "to": "ada",
        "at": "2026-03-29T00:30:01.500Z",
        "number": 1_774_744_201.5,
    }
    assert task.headers == {
        "trace": "1",
        "taskqueue-schedule": "digest",
        "taskqueue-instant": "2026-03-29T00:30:01.500Z",
    }
    assert (task.priority, task.tenant) == (7, "acme")
    assert task.not_before is not None
    assert 0 < task.not_before - 1_774_744_201.5 <= 100
    assert task.deadline == task.not_before + 60
    again = Spec.decode(Spec(schedule=schedule).encode()).schedule
    assert scheduled_task(again, 1_774_744_201.5) == task


def test_overlap_is_decided_by_a_unique_key() -> None:
    """U13: skip keeps the earlier task, replace replaces it, wait lets one run and one wait, allow decides nothing."""

    def fields(overlap: Overlap) -> tuple[str | None, UniqueKey | None]:
        task = scheduled_task(Schedule("s", Every(60), MAIL, overlap=overlap), 60.0)
        return task.ordering_key, task.unique

    assert fields("skip") == (None, UniqueKey(key="schedule:s"))
    assert fields("replace") == (None, UniqueKey(key="schedule:s", on_conflict="replace"))
    assert fields("wait") == ("schedule:s", UniqueKey(key="schedule:s", until="started"))
    assert fields("allow") == (None, None)


@pytest.mark.parametrize(
    ("overlap", "until", "on_conflict", "allowed"),
    [
        (overlap, until, on_conflict, allowed)
        for overlap, fitting in {
            "skip": [("ended", "keep"), ("ended", "refuse")],
            "replace": [("ended", "replace")],
            "wait": [("started", "keep"), ("started", "refuse")],
            "allow": [(until, how) for until in get_args(Until) for how in get_args(OnConflict)],
        }.items()
        for until in get_args(Until)
        for on_conflict in get_args(OnConflict)
        for allowed in [(until, on_conflict) in fitting]
    ],
)
def test_a_unique_key_of_the_task_agrees_with_overlap(
    overlap: Overlap, until: Until, on_conflict: OnConflict, *, allowed: bool
) -> None:
    """U12, U13: the key of the task takes the place of that of the schedule; one that contradicts is refused."""
    key = UniqueKey(key="work", until=until, on_conflict=on_conflict)
    task = TaskTemplate.of("mail", unique=key)
    if allowed:
        published = scheduled_task(Schedule("s", Every(60), task, overlap=overlap), 60.0)
        assert published.unique == key
        assert published.ordering_key == ("schedule:s" if overlap == "wait" else None)
    else:
        with pytest.raises(InvalidInput, match="overlap='allow'") as caught:
            Schedule("s", Every(60), task, overlap=overlap)
        assert caught.value.field == "overlap"


@given(st.integers(0, 10**9), st.floats(0.001, 86_400))
def test_jitter_spreads_the_tasks(instant: int, jitter: float) -> None:
    """U13: the delay is at most the jitter, differs between names, and is no random number."""
    schedules = [Schedule(f"s{n}", Every(1), MAIL, jitter=jitter) for n in range(20)]
    delays = [schedule.delay(instant) for schedule in schedules]
    assert all(0 <= delay <= jitter + 0.0005 for delay in delays)
    assert delays == [schedule.delay(instant) for schedule in schedules]
    if jitter > 1:
        assert len(set(delays)) > 1


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("name", {"name": ""}),
        ("name", {"name": "two words"}),
        ("name", {"name": "x" * 171}),
        ("name", {"name": None}),
        ("when", {"when": "* * * * *"}),
        ("when", {"when": 60}),
        ("call", {"call": None}),
        ("call", {"call": {"key": "mail"}}),
        ("catch_up", {"catch_up": "some"}),
        ("catch_up", {"catch_up": ["all"]}),
        ("overlap", {"overlap": True}),
        ("overlap", {"overlap": "wait", "call": TaskTemplate.of("mail", ordering_key="o")}),
        ("late", {"late": 0}),
        ("late", {"late": "soon"}),
        ("jitter", {"jitter": -1}),
        ("jitter", {"jitter": 86_401}),
        ("starts", {"starts": datetime(2026, 1, 1)}),  # noqa: DTZ001 - what is refused
        ("ends", {"ends": 7}),
        (
            "ends",
            {
                "starts": datetime(2026, 1, 2, tzinfo=UTC),
                "ends": datetime(2026, 1, 2, tzinfo=UTC),
            },
        ),
        ("paused", {"paused": "no"}),
    ],
)
def test_a_schedule_names_the_field_that_is_not_allowed(field: str, fields: dict[str, Any]) -> None:
    """U13: bad input is refused with the field's name."""
    with pytest.raises(InvalidInput) as caught:
        Schedule(**{"name": "s", "when": Every(60), "call": MAIL, **fields})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("key", {"key": "two words"}),
        ("payload", {"payload": "text"}),
        ("payload", {"payload": b"{"}),
        ("priority", {"priority": 10}),
        ("tenant", {"tenant": ""}),
        ("max_attempts", {"max_attempts": 0}),
        ("expires_in", {"expires_in": -1}),
        ("headers", {"headers": {f"h{n}": "" for n in range(31)}}),
        ("instants", {"instants": {"at": "date"}}),
        ("instants", {"instants": "at"}),
        ("instants", {"instants": {"at": "text"}, "payload": b"[1]"}),
        ("unique", {"unique": "work"}),
        (
            "unique",
            {"unique": UniqueKey(key="work", on_conflict="replace", debounce=Debounce(5))},
        ),
    ],
)
def test_a_template_names_the_field_that_is_not_allowed(field: str, fields: dict[str, Any]) -> None:
    """U13: what the queue would refuse at each instant is refused when the schedule is written."""
    with pytest.raises(InvalidInput) as caught:
        TaskTemplate(**{"key": "mail", **fields})
    assert caught.value.field == field


def test_the_stored_form_is_checked_when_it_is_read() -> None:
    """U13: a damaged text, another version or an unknown time zone is refused, and names what is wrong."""
    spec = Spec(schedule=Schedule("s", Cron("@daily"), MAIL), declared_by="shop.")
    text = spec.encode()
    assert Spec.decode(text) == spec
    assert not spec.is_paused
    assert msgspec.structs.replace(spec, paused=True).is_paused
    for damaged, field in [
        (text[:-1], "schedule"),
        (b"\xff", "schedule"),
        (b"[]", "schedule"),
        (text.replace(b'{"schedule"', b'{"v":2,"schedule"'), "schedule"),
        (text.replace(b"@daily", b"@never"), "expression"),
        (text.replace(b'"@daily"', b'"@daily","timezone":"Mars/Olympus"'), "timezone"),
        (text.replace(b'"cron"', b'"moon"'), "schedule"),
    ]:
        with pytest.raises(InvalidInput) as caught:
            Spec.decode(damaged)
        assert caught.value.field == field
    large = Schedule("s", Every(60), TaskTemplate.of("mail", "x" * 262_100))
    with pytest.raises(TooLarge, match="schedule"):
        Spec(schedule=large).encode()


def test_instants_as_text() -> None:
    """U14: seconds, or milliseconds where they are not zero."""
    assert text_of(1_774_744_200) == "2026-03-29T00:30:00Z"
    assert text_of(1_774_744_200.001) == "2026-03-29T00:30:00.001Z"
