"""The instants of schedules: cron expressions in time zones with both changes of the clock, and intervals."""

import math
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskqueue_core.errors import InvalidInput, TaskQueueError
from taskqueue_core.schedules import Cron, Every, following, text_of
from taskqueue_core.schedules.when import start_of_newest

ZONES = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",  # its clock changes by half an hour
    "America/Santiago",  # its clock changes at midnight
    "Asia/Kolkata",  # its clock does not change
]
YEAR = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
times = st.integers(0, 366 * 86_400 * 1000).map(lambda thousandth: YEAR + thousandth / 1000)
# Times close to a change of the clock in one of the zones.
changes = st.sampled_from(
    ["03-29T01", "10-25T01", "03-08T07", "11-01T06", "04-04T15", "10-03T15", "04-05T03", "09-06T04"]
).flatmap(
    lambda hour: st.integers(-4 * 3600, 4 * 3600).map(
        lambda offset: datetime.fromisoformat(f"2026-{hour}:00:00+00:00").timestamp() + offset
    )
)


@st.composite
def crons(draw: st.DrawFn) -> Cron:
    """Draw an expression that matches at least one day in each month, in one of the zones."""
    minute = draw(st.sampled_from(["*", "0", "30", "15,45", "*/20", "10-40/15", "59"]))
    hour = draw(st.sampled_from(["*", "0", "2", "1-3", "*/2", "0,2,23", "3"]))
    day = draw(st.sampled_from(["*", "1", "L", "*/7", "LW", "5,25,29"]))
    weekday = draw(st.sampled_from(["*", "SUN", "MON-FRI", "5L", "1#2"]))
    if day != "*" and not day.startswith("*"):
        weekday = "*"
    return Cron(f"{minute} {hour} {day} * {weekday}", draw(st.sampled_from(ZONES)))


whens = st.one_of(
    crons(),
    st.builds(
        Every,
        st.one_of(
            st.integers(1, 10**7),
            st.integers(1000, 10**7).map(lambda thousandths: thousandths / 1000),
        ),
        st.one_of(st.none(), times.map(lambda at: datetime.fromtimestamp(at, UTC))),
    ),
)


def instants_of(when: Cron | Every, start: float, end: float) -> list[float]:
    """Return the instants after ``start``, up to ``end``, each computed from the one before."""
    found: list[float] = []
    instant = following(when, start)
    while instant is not None and instant <= end:
        found.append(instant)
        instant = following(when, instant)
    return found


@pytest.mark.parametrize(
    ("zone", "expression", "day", "expected"),
    [
        # A fixed time in the hour that is skipped: once, at the end of the gap.
        ("Europe/Berlin", "30 2 * * *", "2026-03-29", ["01:00"]),
        ("America/New_York", "30 2 * * *", "2026-03-08", ["07:00"]),
        ("Australia/Lord_Howe", "15 2 * * *", "2026-10-03", ["15:30"]),
        ("America/Santiago", "30 0 * * *", "2026-09-06", ["04:00"]),
        ("Asia/Kolkata", "30 2 * * *", "2026-03-29", ["21:00"]),
        # A fixed time in the hour that is repeated: once, the first time.
        ("Europe/Berlin", "30 2 * * *", "2026-10-25", ["00:30"]),
        ("America/New_York", "30 1 * * *", "2026-11-01", ["05:30"]),
        ("Australia/Lord_Howe", "45 1 * * *", "2026-04-04", ["14:45"]),
        ("America/Santiago", "30 23 * * *", "2026-04-05", ["02:30"]),
        ("Asia/Kolkata", "30 2 * * *", "2026-10-25", ["21:00"]),
        # Several fixed times in the gap: one instant, at its end.
        ("Europe/Berlin", "0,30 2,3 * * *", "2026-03-29", ["01:00", "01:30"]),
    ],
)
def test_a_fixed_time_occurs_once_on_a_day_on_which_the_clock_changes(
    zone: str, expression: str, day: str, expected: list[str]
) -> None:
    """U14: a time that the change skips is moved to the end of the gap, one that it repeats counts the first time."""
    start = datetime.fromisoformat(f"{day}T00:00:00+00:00").timestamp() - 0.001
    instants = instants_of(Cron(expression, zone), start, start + 86_400)
    assert [text_of(each)[11:16] for each in instants] == expected


@pytest.mark.parametrize("zone", ZONES)
def test_each_day_of_the_year_has_one_instant(zone: str) -> None:
    """U14: through both changes of the clock, a daily schedule has an instant on each date, in each zone."""
    for hour in (0, 1, 2, 3, 23):
        instants = instants_of(Cron(f"17 {hour} * * *", zone), YEAR, YEAR + 365 * 86_400)
        assert len(instants) == 365
        assert all(82_000 <= later - earlier <= 91_000 for earlier, later in pairwise(instants))


@pytest.mark.parametrize("zone", ZONES)
def test_an_expression_with_a_star_follows_the_time_that_passes(zone: str) -> None:
    """U14: through both changes of the clock, an instant every half hour."""
    for first, days in ((59, 40), (243, 65)):  # March to April, September to November
        start = YEAR + first * 86_400
        instants = instants_of(Cron("*/30 * * * *", zone), start, start + days * 86_400)
        assert {later - earlier for earlier, later in pairwise(instants)} == {1800.0}


@given(whens, st.one_of(times, changes))
@example(
    Cron("30 2 * * *", "Europe/Berlin"), 1792891800.0
)  # in the repeated hour, for the second time
def test_an_instant_follows_and_does_not_depend_on_the_start(
    when: Cron | Every, after: float
) -> None:
    """U14: from any time between two instants, the later one comes next; it is later, and has whole milliseconds."""
    instant = following(when, after)
    assert instant is not None
    assert instant > after
    assert instant == round(instant, 3)
    for between in (after + (instant - after) / 2, math.nextafter(instant, 0)):
        if after <= between < instant:
            assert following(when, between) == instant


@given(whens, st.one_of(times, changes), st.integers(1, 50))
def test_the_newest_instants_are_found_backwards(
    when: Cron | Every, until: float, count: int
) -> None:
    """U13: from the start of the newest instants on, there are at least as many as were asked for."""
    start = start_of_newest(when, until, count)
    if isinstance(when, Cron) or when.since is None:
        assert len(instants_of(when, start - 0.001, until)) >= count


@given(st.integers(1000, 10**8), times)
def test_an_interval_never_drifts(thousandths: int, since: float) -> None:
    """U13: the instants of an interval are whole multiples of it after the first."""
    when = Every(thousandths / 1000, since=datetime.fromtimestamp(since, UTC))
    first = following(when, 0)
    assert first is not None
    assert abs(first - since) < 0.0011
    for steps in (1, 10, 100_000):
        expected = round(first * 1000) + steps * thousandths
        assert following(when, (expected - 1) / 1000) == expected / 1000


@pytest.mark.parametrize(
    ("name", "expression"),
    [
        ("@hourly", "0 * * * *"),
        ("@Daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * SUN"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
    ],
)
def test_a_name_is_short_for_an_expression(name: str, expression: str) -> None:
    """U13: names such as @daily."""
    assert following(Cron(name), YEAR) == following(Cron(expression), YEAR)


def test_the_number_of_fields_is_named() -> None:
    """U13: an expression with too few fields says how many it has."""
    with pytest.raises(InvalidInput, match="got 1 field;"):
        Cron("@reboot")
    with pytest.raises(InvalidInput, match="got 4 fields;"):
        Cron("* * * *")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("expression", {"expression": "61 * * * *"}),
        ("expression", {"expression": "* * * *"}),
        ("expression", {"expression": "0 * * * * *"}),
        ("expression", {"expression": "@reboot"}),
        ("expression", {"expression": "* * * * 1L/2"}),
        ("expression", {"expression": "0 0 30 2 *"}),
        ("expression", {"expression": "0 0 */20 * 1L"}),
        ("expression", {"expression": "* " * 5000}),
        ("expression", {"expression": ""}),
        ("expression", {"expression": 5}),
        ("timezone", {"expression": "* * * * *", "timezone": "Mars/Olympus"}),
        ("timezone", {"expression": "* * * * *", "timezone": "../etc/passwd"}),
        ("timezone", {"expression": "* * * * *", "timezone": "localtime"}),
        ("timezone", {"expression": "* * * * *", "timezone": ""}),
        ("timezone", {"expression": "* * * * *", "timezone": ["UTC"]}),
        ("seconds", {"seconds": 0.999}),
        ("seconds", {"seconds": 0}),
        ("seconds", {"seconds": -60}),
        ("seconds", {"seconds": 1.0001}),
        ("seconds", {"seconds": float("nan")}),
        ("seconds", {"seconds": float("inf")}),
        ("seconds", {"seconds": "60"}),
        ("since", {"seconds": 60, "since": datetime(2026, 1, 1)}),  # noqa: DTZ001 - what is refused
        ("since", {"seconds": 60, "since": 5}),
        ("since", {"seconds": 60, "since": datetime(1960, 1, 1, tzinfo=UTC)}),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_its_name(
    field: str, fields: dict[str, Any]
) -> None:
    """U13: an invalid expression, time zone or interval names its field, and does not repeat the value."""
    kind = Cron if "expression" in fields else Every
    with pytest.raises(InvalidInput) as caught:
        kind(**fields)
    assert caught.value.field == field
    assert isinstance(caught.value, TaskQueueError)
    assert "Mars" not in str(caught.value)


@given(st.text(max_size=30))
@example("* * * * MON#6")
@example("1#2/3 * L/2 * LW")
def test_any_text_is_an_expression_or_invalid_input(text: str) -> None:
    """U13: no text makes another error, or takes long."""
    with suppress(InvalidInput):
        assert following(Cron(text), YEAR) is not None


def test_the_last_instants_end_with_the_calendar() -> None:
    """U13: there is no instant after the year 9999, whose last day has none of a cron expression."""
    end = datetime(9999, 12, 31, 23, 59, 30, tzinfo=UTC)
    assert following(Every(60), end.timestamp()) is None
    for zone in ZONES:
        assert following(Cron("* * * * *", zone), (end - timedelta(hours=23)).timestamp()) is None
