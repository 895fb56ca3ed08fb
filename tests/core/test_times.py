"""Times as people write them."""

from __future__ import annotations

import pytest

from taskqueue_core.errors import InvalidInput
from taskqueue_core.times import RECENT, parse_moment, parse_time

NOW = 1_796_047_500.0
"""2026-11-30T14:05:00Z"""


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-11-30T14:05", NOW),
        ("2026-11-30 14:05:00", NOW),
        ("2026-11-30T14:05Z", NOW),
        ("2026-11-30T16:05:00.5+02:00", NOW + 0.5),
        ("2026-11-30", NOW - 14 * 3600 - 300),
        ("1796047500", NOW),
        ("5.25", 5.25),
        ("0s", NOW),
        ("-90s", NOW - 90),
        ("15m", NOW - 900),
        ("-1h", NOW - 3600),
        ("7d", NOW - 7 * 86_400),
        ("999999999d", 0.0),
    ],
)
def test_forms_of_times(text: str, time: float) -> None:
    """U20: a time is ISO 8601, in UTC by default, or Unix seconds, or how long ago it was."""
    assert parse_time("since", text, NOW) == time


@pytest.mark.parametrize(
    "text",
    [
        "", "soon", "1w", "+1h", "--1h", "1.5h", "12", "\u0661h", "-1", "nan", "1e9", "2026-13-01", "1h ago",
        "x" * 9999,
    ],
)  # fmt: skip
def test_what_is_no_time(text: str) -> None:
    """U20: other text is refused; the error names the field and the possible forms, and does not show the text."""
    with pytest.raises(InvalidInput) as error:
        parse_time("since", text, NOW)
    assert str(error.value).startswith(f"since: got text of length {len(text)} that is no time")
    assert str(error.value).endswith(RECENT)


@pytest.mark.parametrize("text", ["2026-11-30T14:05", "-1h", "15m"])
def test_times_that_depend_on_the_present(text: str) -> None:
    """U20: without the present, a time zone is required, and kept, and no time is relative."""
    with pytest.raises(InvalidInput, match=r"starts: got .*with a time zone"):
        parse_moment("starts", text)
    shown = "2026-11-30T14:05:00+01:00"
    assert parse_moment("starts", shown).isoformat() == shown
