"""Changing queue settings: concurrent changes are merged, and errors name the invalid field."""

import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from taskqueue_core.capabilities import Control, Order, QueueSettings
from taskqueue_core.errors import InvalidInput, SettingsConflict
from taskqueue_core.queue_settings import (
    change_settings,
    pause_queue,
    read_settings,
    reset_settings,
)
from taskqueue_core.rate_limit import IntervalUnit, RateLimit


class Settings:
    """The settings of one queue; each read is followed by a concurrent change, until the list of changes is used up."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self.found = QueueSettings()
        self.writes = 0
        self._others = list(others)

    async def settings(self, _: str) -> QueueSettings:
        """Return the current settings, then apply the next concurrent change."""
        found = self.found
        if self._others:
            self.found = found.followed_by(found.model_copy(update=self._others.pop(0)))
        return found

    async def configure(self, _: str, settings: QueueSettings) -> QueueSettings:
        """Store the settings if their version is current."""
        self.found = self.found.followed_by(settings)
        self.writes += 1
        return self.found


def control(*others: dict[str, Any]) -> tuple[Settings, Control]:
    """Return the fake settings twice: once as they are, and once typed as a `Control`."""
    settings = Settings(*others)
    return settings, cast("Control", settings)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``asyncio.sleep`` so that conflicting changes are retried without a pause."""

    async def sleep(_: float) -> None:
        pass

    monkeypatch.setattr("taskqueue_core.queue_settings.asyncio.sleep", sleep)


async def test_what_others_change_meanwhile_is_kept() -> None:
    """Fault K6: a pause that conflicts with two concurrent changes is retried, and all three changes take effect."""
    settings, asked = control({"capacity": 5}, {"max_losses": 1})
    told = await pause_queue(asked, "k", intake=False, paused=True)
    assert told == QueueSettings(version=3, capacity=5, max_losses=1, paused=True)
    assert settings.found == told


async def test_pausing_twice_writes_once() -> None:
    """Pausing a paused queue writes nothing; the pause of the intake and the pause of deliveries are separate flags."""
    settings, asked = control()
    for _ in range(2):
        told = await pause_queue(asked, "k", intake=True, paused=True)
        assert (told.version, told.intake_paused, told.paused) == (1, True, False)
    told = await pause_queue(asked, "k", intake=True, paused=False)
    assert (told.version, told.intake_paused) == (2, False)
    assert settings.writes == 2


async def test_an_endless_quarrel_is_given_up() -> None:
    """If each retry conflicts with another change, `SettingsConflict` is raised after a few retries."""
    settings, asked = control(*({"max_losses": n} for n in range(100)))
    with pytest.raises(SettingsConflict):
        await pause_queue(asked, "k", intake=False, paused=True)
    assert 5 <= settings.found.version <= 20
    assert settings.writes == 0


async def test_a_reset_keeps_the_version_growing() -> None:
    """A reset restores all defaults but raises the version, so that no outdated copy matches the new version."""
    settings, asked = control()
    settings.found = QueueSettings(version=7, capacity=1, max_losses=0)
    assert await reset_settings(asked, "k") == QueueSettings(version=8)
    assert await reset_settings(asked, "k", version=8) == QueueSettings(version=8)


@pytest.mark.parametrize("call", [reset_settings, change_settings])
async def test_a_version_that_is_not_in_force(call: Callable[..., Any]) -> None:
    """If the caller names a version that is not current when reading or writing, `SettingsConflict` is raised."""
    edit = [lambda found: found] if call is change_settings else []
    settings, asked = control()
    settings.found = QueueSettings(version=2, paused=True)
    with pytest.raises(SettingsConflict, match=r"version 2 .* not 1"):
        await call(asked, "k", *edit, version=1)
    settings, asked = control({"max_losses": 1}, {"max_losses": 2})
    with pytest.raises(SettingsConflict):
        await reset_settings(asked, "k", version=1)
    assert settings.writes == 0


async def test_a_bad_name_is_refused_before_anything_is_read() -> None:
    """An invalid queue name is refused before the settings are read."""
    with pytest.raises(InvalidInput, match=r"^key: "):
        await pause_queue(control()[1], "a/b", intake=False, paused=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"capacity":0}', "capacity: got int out of range; allowed: greater than or equal to 1"),
        ('{"capacity":true}', "capacity: got bool; allowed: a valid integer"),
        ('{"max_inflight":"5"}', "max_inflight: got str of length 1; allowed: a valid integer"),
        ('{"paused":"yes"}', "paused: got str of length 3; allowed: a valid boolean"),
        ('{"rate_limit":[1]}', "rate_limit: got list of length 1; allowed: an object"),
        ('{"rate_limit":{}}', "rate_limit.max_tokens: got nothing; allowed: a value"),
        (
            '{"durability":"x"}',
            "durability: got str of length 1 out of range; allowed: 'memory', 'process', 'disk' or 'replicated'",
        ),
        (
            '{"rate_limit":{"max_tokens":1,"s3cret":1}}',
            "rate_limit: got an unknown field; allowed: max_tokens, interval, interval_unit",
        ),
        ('{"order":"lifo"}', "order: got str of length 4 out of range; allowed: 'fifo' or 'fair'"),
        (
            '{"weights":{"s3cret":1}}',
            "weights: got dict of length 1; allowed: its default, because it needs order 'fair'",
        ),
        (
            '{"shards":4,"capacity":1}',
            "shards: got int; allowed: its default, because a queue with the setting capacity cannot have shards",
        ),
        (
            '{"order":"fair","weights":{"s3cret":0}}',
            "weights: got int out of range; allowed: greater than or equal to 1",
        ),
        (
            '{"floor_share":0.6}',
            "floor_share: got float out of range; allowed: less than or equal to 0.5",
        ),
        (
            '{"max_processing_time":0}',
            "max_processing_time: got int out of range; allowed: greater than 0",
        ),
        ("[]", "settings: got list of length 0; allowed: an object"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    """Fault K4: the error names the field, the type received and the values allowed, but does not show the value."""
    with pytest.raises(InvalidInput) as caught:
        read_settings(text.encode())
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moved_to", "a/s3cret"),
        ("bound_to", ["fine", "{s3cret}"]),
        ("weights", {"a s3cret": 1}),
        ("weights", {"s3cret" * 50: 1}),
        ("paused_tenants", ["fine", "a s3cret"]),
        ("paused_tenants", ["fine", "fine"]),
        ("paused_tenants", [f"t{n}" for n in range(1001)]),
    ],
)
def test_names_in_settings(field: str, value: object) -> None:
    """Fault K4: names of queues and tenants in settings are checked like all names; the error does not show them."""
    with pytest.raises(InvalidInput) as caught:
        read_settings(json.dumps({"order": "fair", field: value}).encode())
    assert caught.value.field == field
    assert "s3cret" not in str(caught.value)


def test_an_unknown_setting_is_answered_with_the_known_ones() -> None:
    """The error for an unknown setting lists the known ones."""
    with pytest.raises(InvalidInput, match="max_inflight") as caught:
        read_settings(b'{"s3cret":1}')
    assert "s3cret" not in str(caught.value)


def test_settings_are_read_as_they_are_written() -> None:
    """Settings that were written as JSON are read back unchanged."""
    limit = RateLimit(max_tokens=5, interval=2, interval_unit=IntervalUnit.HOURS)
    settings = QueueSettings(
        version=3,
        capacity=9,
        rate_limit=limit,
        paused=True,
        result_ttl=5,
        moved_to="elsewhere",
        max_processing_time=0.5,
        order=Order.FAIR,
        weights={"a": 3},
        tenant_rate_limit=limit,
        floor_share=0.25,
        bound_to=("a", "b"),
    )
    assert read_settings(settings.model_dump_json().encode()) == settings
