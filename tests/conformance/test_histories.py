"""A history that fails is shortened for a bounded time, and can be run again."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import settings

from taskqueue_conformance import histories
from taskqueue_conformance.model.machine import MachineSuite
from taskqueue_core.tasks import Delivery, Settled
from tests.conformance import broken_consumers as consumers
from tests.conformance.runner import suite_on


class Slow(consumers.CountsHandBackAsLoss):
    """Defect: a release counts as a loss, and takes long."""

    calls = 0

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """Wait as a slow store does, and count the call."""
        Slow.calls += 1
        time.sleep(0.02)  # noqa: ASYNC251 - the histories take real time
        return await super().redeliver(*deliveries, lost=lost)


@pytest.fixture(autouse=True)
def _random(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draw histories at random and store none, whatever profile the project uses."""
    before = settings.get_current_profile_name()
    settings.register_profile("drawn", derandomize=False, database=None)
    settings.load_profile("drawn")
    monkeypatch.delenv(histories.SEED, raising=False)
    yield
    settings.load_profile(before)


def _failure(monkeypatch: pytest.MonkeyPatch, seconds: float) -> AssertionError:
    Slow.calls = 0
    monkeypatch.setattr(histories, "SHRINKING", seconds)
    with pytest.raises(AssertionError) as failure:
        suite_on(Slow, MachineSuite).test_machine()
    return failure.value


def test_shrinking_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis stops shortening a slow history at the limit, which is below a minute (G6)."""
    assert histories.SHRINKING < 60
    monkeypatch.setenv(histories.SEED, "1")
    _failure(monkeypatch, 0)
    calls = Slow.calls
    _failure(monkeypatch, 3)
    assert calls < Slow.calls, "the limit of time has no effect"


def test_seed_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure names the seed, and with this seed the same history fails again (G6)."""
    first = _failure(monkeypatch, 0)
    (seed,) = re.findall(rf"set {histories.SEED}=(\d+)", "\n".join(first.__notes__))
    monkeypatch.setenv(histories.SEED, seed)
    assert _text(_failure(monkeypatch, 0)) == _text(first)


def _text(error: AssertionError) -> str:
    """Return the message of an error, without the addresses of objects."""
    return re.sub(r"0x[0-9a-f]+", "", str(error))
