"""`Routes`: queue names derived by a rule from a kind of work and an id."""

from __future__ import annotations

import doctest
from pathlib import Path
from uuid import UUID

import pytest
from pydantic import ValidationError

from taskqueue_core.clock import ManualClock
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import check_name
from taskqueue_core.routes import Route, Routes
from taskqueue_core.tasks import State, Task
from taskqueue_memory import MemoryBackend

ID = UUID("0123456789abcdef0123456789abcdef")
NOBODY = UUID(int=0)
PREFIXES = {
    "deployment-prediction": "input:prediction:dp-",
    "function-prediction": "input:prediction:fp-",
    "version-prediction": "input:prediction:vp-",
    "version-training": "input:training:vt-",
}
ROUTES = Routes(*(Route(kind=kind, prefix=prefix) for kind, prefix in PREFIXES.items()))


@pytest.mark.parametrize(("kind", "prefix"), PREFIXES.items())
def test_the_worked_rule(kind: str, prefix: str) -> None:
    """A2, A3, A4, A5, A6: each kind has its own prefix and each id its own queue; every derived name is valid."""
    key = ROUTES.key(kind, ID)
    assert key == prefix + "0123456789abcdef0123456789abcdef"
    check_name("key", key)
    assert key != ROUTES.key(kind, NOBODY)
    assert ROUTES.kinds(key) == (kind,)


def test_kinds_that_share_a_queue() -> None:
    """A7: kinds with a shared id use the same queue, for which both kinds are returned. Other kinds are unaffected."""
    prefix = PREFIXES["function-prediction"]
    pipelines = ("function-prediction", "version-prediction")
    shared = [Route(kind=kind, prefix=prefix, shared=NOBODY) for kind in pipelines]
    routes = Routes(*shared, Route(kind="version-training", prefix="input:training:vt-"))
    keys = {routes.key(kind, of) for kind in pipelines for of in (ID, UUID(int=7))}
    assert keys == {f"input:prediction:fp-{'0' * 32}"}
    assert routes.kinds(keys.pop()) == pipelines
    assert routes.kinds(prefix + ID.hex) == ()
    assert routes.kinds(routes.key("version-training", ID)) == ("version-training",)


@pytest.mark.parametrize("key", ["", "work", ID.hex, f"input:training:vt-{'x' * 32}", "a" * 200])
def test_names_of_another_rule(key: str) -> None:
    """A2: a name that was not derived by the rule belongs to no kind."""
    assert ROUTES.kinds(key) == ()


def test_bad_rules() -> None:
    """A2: a rule that is ambiguous or gives invalid names is refused with an error that says what is allowed."""
    with pytest.raises(ConfigurationError, match="same kind"):
        Routes(Route(kind="a", prefix="x-"), Route(kind="a", prefix="y-"))
    with pytest.raises(ValidationError, match="prefix"):
        Route(kind="a", prefix="no blanks")
    with pytest.raises(ValidationError, match="at most 168 characters"):
        Route(kind="a", prefix="x" * 169)
    with pytest.raises(InvalidInput, match=r"kind: .*one of deployment-prediction, .*"):
        ROUTES.key("unheard-of", ID)


async def test_a_kind_that_comes_later() -> None:
    """A8: maintenance has no fixed list of queues: a queue of a new kind is maintained like any other."""
    clock = ManualClock()
    backend = MemoryBackend(clock=clock)
    routes = Routes(Route(kind="hotswap-prediction", prefix="input:prediction:hp-"))
    key = routes.key("hotswap-prediction", ID)
    await backend.publisher.publish(Task(key=key, id="t", deadline=clock.now() + 1))
    await clock.advance(2)
    assert [one.task_id for one in (await backend.control.maintain()).expired] == ["t"]
    (status,) = await backend.control.statuses(key, "t")
    assert status is not None
    assert status.state is State.EXPIRED
    await backend.aclose()


def test_the_page() -> None:
    """A2, A7: the examples in docs/names.md give the output shown there."""
    page = Path(__file__).parents[2] / "docs/names.md"
    tried = doctest.testfile(str(page), module_relative=False)
    assert tried.attempted >= 8
    assert tried.failed == 0
